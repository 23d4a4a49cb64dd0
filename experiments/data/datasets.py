import functools
import hashlib
import http.client
import math
import os
import queue
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import pooch
from jaxtyping import Float32, Int32, UInt8

from experiments.output.errors import UserError
from jaxbp.logic.tables.quantizer import Quantizer

DatasetName = Literal["digits", "mnist", "fashion_mnist", "cifar10"]

IMAGE_SHAPES: Mapping[DatasetName, tuple[int, int, int]] = {
    "digits": (1, 28, 28),
    "mnist": (1, 28, 28),
    "fashion_mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
}
"""Channels, height, and width."""
CLASSES = 10
MOST_ITEMS = 1_000_000
PIECE_BYTES = 2**16
SLOW_SECONDS, SLOW_BYTES = 30, 30_000
"""A mirror that sends fewer bytes in this time is given up."""
MOST_BYTES = 10**8
"""The largest download."""

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

MIRRORS: Mapping[str, Sequence[str]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion_mnist": (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
}

MD5: Mapping[str, Mapping[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
}


# CIFAR-10's files have no header. A label of one byte precedes each image.
CIFAR10_FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR10_RECORD = 1 + math.prod(IMAGE_SHAPES["cifar10"])


class Features(NamedTuple):
    """The columns of a table. A column of text has the indices of categories."""

    names: Sequence[str]
    categories: Mapping[int, Sequence[str]]
    """The categories of the columns of text, by the index of the column."""
    classes: Sequence[str] | None = None
    """The names of the classes. None: their numbers."""
    quantizer: Quantizer | None = None
    """The function that turned the rows into bits. None: the data are no bits."""


class Dataset(NamedTuple):
    train_images: Float32[np.ndarray, "train channels height width"]
    train_labels: Int32[np.ndarray, " train"]
    test_images: Float32[np.ndarray, "test channels height width"]
    test_labels: Int32[np.ndarray, " test"]
    name: str
    features: Features | None = None
    """None: the data are images."""
    classes: int = CLASSES


def checksum(*arrays: np.ndarray) -> str:
    """Return the SHA-256 of the arrays with their dtypes and shapes."""
    result = hashlib.sha256()
    for array in arrays:
        result.update(f"{array.dtype} {array.shape} ".encode())
        result.update(np.ascontiguousarray(array).view(np.uint8))
    return result.hexdigest()


def load(
    name: DatasetName,
    data_dir: Path | None = None,
    *,
    mirrors: Sequence[str] | None = None,
    md5: Mapping[str, str] | None = None,
) -> Dataset:
    """Load a dataset.

    Args:
      data_dir: the folder of the files. None: `jaxbp/<name>` in the user's cache folder. Missing files of MNIST and
        Fashion-MNIST are downloaded.
      mirrors: base addresses for downloads, tried in this order.
      md5: the MD5 checksums of downloaded files, by name.

    Raises:
      UserError: for an unknown name, a file with a wrong header, size, or label, or a damaged gzip file. In an unzipped
        file, changed pixels and labels are not noticed.
      FileNotFoundError: if a file is missing and cannot be downloaded.
    """
    if name == "digits":
        return _digits()
    if name not in IMAGE_SHAPES:
        raise UserError(f"dataset is {name!r}; wants one of {', '.join(IMAGE_SHAPES)}")
    folder = default_data_dir(name) if data_dir is None else Path(data_dir)
    if name == "cifar10":
        return Dataset(*_read_cifar10_split(folder, "train"), *_read_cifar10_split(folder, "test"), name)
    mirrors = MIRRORS[name] if mirrors is None else mirrors
    md5 = MD5[name] if md5 is None else md5
    paths = {split: [_find_or_download(folder, file, mirrors, md5) for file in files] for split, files in FILES.items()}
    shape = IMAGE_SHAPES[name][1:]
    dataset = Dataset(*_read_split(*paths["train"], shape), *_read_split(*paths["test"], shape), name)
    for path in (*paths["train"], *paths["test"]):
        _refuse_files_of_another_dataset(path, name)
    return dataset


def default_data_dir(name: str) -> Path:
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise UserError(
            f"{str(error).rstrip('.')}; wants the folder of the data, data_dir, or the variable XDG_CACHE_HOME"
        ) from None
    return Path(cache) / "jaxbp" / name


def read_idx(path: Path, item_shape: tuple[int, ...]) -> UInt8[np.ndarray, "items ..."]:
    """Read an IDX file of bytes, gzipped if its name ends in `.gz`, as an array `(items, *item_shape)`."""
    dimensions = 1 + len(item_shape)
    header_bytes = 4 * (1 + dimensions)
    try:
        with path.open("rb") as file:
            pieces = _unzipped(file) if path.suffix == ".gz" else iter(lambda: file.read(PIECE_BYTES), b"")
            content = bytearray(next(pieces, b""))
            header = content[:header_bytes]
            if len(header) < header_bytes:
                raise UserError(
                    f"{path}: has {len(header)} bytes; wants at least {header_bytes}, the size of the header"
                )
            magic, *shape = np.frombuffer(header, ">u4").tolist()
            wanted_magic = 0x0800 + dimensions
            if magic != wanted_magic:
                raise UserError(f"{path}: the magic number is {magic:#010x}; wants {wanted_magic:#010x}")
            if tuple(shape[1:]) != item_shape:
                raise UserError(f"{path}: items have shape {tuple(shape[1:])}; wants {item_shape}")
            if not 1 <= shape[0] <= MOST_ITEMS:
                raise UserError(f"{path}: has {shape[0]} items; wants at least 1 and at most {MOST_ITEMS}")
            wanted_bytes = math.prod(shape)
            # The header of a small file can claim gigabytes, and a small gzip file can expand to gigabytes.
            while len(content) <= header_bytes + wanted_bytes and (piece := next(pieces, b"")):
                content += piece
    except zlib.error as error:
        raise UserError(f"{path}: {error}; wants a whole gzip file") from error
    if (found := len(content) - header_bytes) != wanted_bytes:
        came = "more" if found > wanted_bytes else found
        raise UserError(f"{path}: has {came} bytes after the header; wants {wanted_bytes}, for the shape {shape}")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _unzipped(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a gzip file. Raise zlib.error if it is damaged or has bytes after its end.

    Python's gzip module would skip zeros after the end one byte at a time.
    """
    unzip = zlib.decompressobj(wbits=31)
    while not unzip.eof:
        zipped = unzip.unconsumed_tail or file.read(PIECE_BYTES)
        piece = unzip.decompress(zipped, PIECE_BYTES)
        if not (zipped or piece):
            raise zlib.error("the file ended before its end marker")
        if piece:
            yield piece
    if unzip.unused_data or file.read(1):
        raise zlib.error("the file has bytes after its end marker")


def _digits() -> Dataset:
    # scikit-learn takes one second to import.
    import jax
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype(np.float32)
    # The digit fills 20 x 20 pixels as in MNIST. The clip removes overshoot.
    images = np.asarray(jax.image.resize(images, (len(images), 20, 20), "cubic")).clip(0, 1)
    images = np.pad(images, ((0, 0), (4, 4), (4, 4)))[:, None]
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    return Dataset(train_images, train_labels, test_images, test_labels, "digits")


def read_cifar10(path: Path) -> tuple[UInt8[np.ndarray, "images 3 32 32"], UInt8[np.ndarray, " images"]]:
    if not path.is_file():
        files = ", ".join(name for names in CIFAR10_FILES.values() for name in names)
        raise FileNotFoundError(f"{path.name} is not in {path.parent}; wants CIFAR-10's binary files there: {files}")
    size = path.stat().st_size
    images, rest = divmod(size, CIFAR10_RECORD)
    if rest or not 1 <= images <= MOST_ITEMS:
        raise UserError(
            f"{path}: has {size} bytes; wants {CIFAR10_RECORD} bytes per image, and 1 to {MOST_ITEMS} images"
        )
    records = np.fromfile(path, np.uint8).reshape(images, CIFAR10_RECORD)
    _refuse_labels(path, records[:, 0])
    return records[:, 1:].reshape(images, *IMAGE_SHAPES["cifar10"]), records[:, 0]


def _read_cifar10_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*(read_cifar10(folder / file) for file in CIFAR10_FILES[split]), strict=True)
    return _scaled(np.concatenate(images)), np.concatenate(labels).astype(np.int32)


def _read_split(images_path: Path, labels_path: Path, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(images_path, shape), read_idx(labels_path, ())
    if len(images) != len(labels):
        raise UserError(f"{labels_path}: has {len(labels)} labels; wants {len(images)}, one per image of {images_path}")
    _refuse_labels(labels_path, labels)
    return _scaled(images[:, None]), labels.astype(np.int32)


def _scaled(images: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    return images.astype(np.float32) / np.float32(255)


def _refuse_labels(path: Path, labels: UInt8[np.ndarray, " items"]) -> None:
    if labels.max() >= CLASSES:
        raise UserError(f"{path}: has the label {labels.max()}; wants labels from 0 to {CLASSES - 1}")


def _refuse_files_of_another_dataset(path: Path, name: str) -> None:
    # MNIST and Fashion-MNIST have files with the same names and shapes.
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()
    for dataset, known in MD5.items():
        if dataset != name and digest in known.values():
            raise UserError(f"{path}: is a file of {dataset}; wants a file of {name}")


def _find_or_download(folder: Path, file: str, mirrors: Sequence[str], md5: Mapping[str, str]) -> Path:
    plain, zipped = folder / file, folder / f"{file}.gz"
    for path in (plain, zipped):
        if path.is_file():
            return path
    is_new, failures = not folder.exists(), []
    for mirror in mirrors:
        url = mirror.rstrip("/") + "/" + zipped.name
        try:
            checksum = f"md5:{md5[zipped.name]}"
            return Path(pooch.retrieve(url, checksum, fname=zipped.name, path=folder, downloader=_download))
        except (OSError, ValueError) as error:
            # The innermost exception is one line long.
            failures.append(f"{url}: {getattr(next(iter(error.args), None), 'reason', error)}")
    if is_new and folder.exists():
        folder.rmdir()  # pooch creates the folder before the download
    wanted = ", ".join(f"{name}[.gz]" for files in FILES.values() for name in files)
    raise FileNotFoundError(
        f"{plain.name} is not in {folder}, and could not be downloaded ({'; '.join(failures) or 'no mirror given'}); "
        f"wants these files in {folder}: {wanted}"
    )


def _download(url: str, file: str, _: pooch.Pooch | None) -> None:
    # A thread reads, because a slow header would extend each time limit of a socket.
    pieces = queue.Queue(maxsize=16)
    threading.Thread(target=_put_pieces, args=(url, pieces), daemon=True).start()
    size, received, deadline = 0, 0, time.monotonic() + SLOW_SECONDS
    with Path(file).open("wb") as out:
        while True:
            try:
                piece = pieces.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                if received < SLOW_BYTES:
                    raise TimeoutError(f"sent only {received:,} bytes in {SLOW_SECONDS} s") from None
                received, deadline = 0, time.monotonic() + SLOW_SECONDS
                continue
            if isinstance(piece, Exception):
                raise piece
            if not piece:
                return
            size, received = size + len(piece), received + len(piece)
            if size > MOST_BYTES:
                raise OSError(f"sent more than {MOST_BYTES:,} bytes")
            out.write(piece)


def _put_pieces(url: str, pieces: queue.Queue) -> None:
    """Put the file at an address into the queue, piece by piece, then b"" or an exception."""
    try:
        with urllib.request.urlopen(url, timeout=SLOW_SECONDS) as response:
            while piece := response.read1(PIECE_BYTES):
                pieces.put(piece)
    except (OSError, ValueError) as error:
        piece = error
    except http.client.HTTPException as error:
        piece = ConnectionError(f"the answer is no HTTP ({error!r})")
    pieces.put(piece)

import contextlib
import functools
import gzip
import hashlib
import http.server
import threading
import time
import tracemalloc

import numpy as np
import pytest

from experiments.data import datasets
from experiments.data.datasets import CIFAR10_FILES, FILES, IMAGE_SHAPES, load

TRAIN_IMAGES, TRAIN_LABELS = FILES["train"]
TEST_IMAGES, TEST_LABELS = FILES["test"]
ALL_FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


def idx(array, magic=None):
    array = np.asarray(array, np.uint8)
    header = np.array([0x0800 + array.ndim if magic is None else magic, *array.shape], ">u4")
    return header.tobytes() + array.tobytes()


@pytest.fixture
def contents():
    random = np.random.default_rng(0)
    return {
        TRAIN_IMAGES: idx(random.integers(0, 256, (20, 28, 28))),
        TRAIN_LABELS: idx(random.integers(0, 10, 20)),
        TEST_IMAGES: idx(random.integers(0, 256, (10, 28, 28))),
        TEST_LABELS: idx(np.arange(10)),
    }


def write(folder, contents, zipped=False):
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    return folder


@pytest.fixture
def serve():
    servers = []

    def start(folder):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def md5_of(folder):
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def assert_same(one, other):
    for a, b in zip(one[:4], other[:4], strict=True):
        np.testing.assert_array_equal(a, b)


def test_digits_are_images_in_the_unit_range_with_labels():
    digits = load("digits")
    assert digits.name == "digits"
    assert (len(digits.train_images), len(digits.test_images)) == (1437, 360)
    for images, labels in (digits[:2], digits[2:4]):
        assert images.shape == (len(labels), 1, 28, 28)
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert images.min() == 0 and images.max() == 1


def test_digits_split_holds_out_a_fifth_of_every_class():
    digits = load("digits")
    train, test = np.bincount(digits.train_labels), np.bincount(digits.test_labels)
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.01)


def test_digits_are_the_same_every_time():
    assert_same(load("digits"), load("digits"))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'cifar'.*digits"):
        load("cifar")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_become_scaled_images_and_labels(name, tmp_path, contents):
    dataset = load(name, write(tmp_path, contents))
    assert dataset.name == name
    assert dataset.train_images.shape == (20, 1, 28, 28) and dataset.train_images.dtype == np.float32
    pixels = np.frombuffer(contents[TRAIN_IMAGES], np.uint8, offset=16).reshape(20, 1, 28, 28)
    np.testing.assert_array_equal(np.round(dataset.train_images * 255), pixels)
    np.testing.assert_array_equal(dataset.test_labels, np.arange(10))
    assert dataset.test_labels.dtype == np.int32


def test_gzipped_files_read_the_same_as_plain_ones(tmp_path, contents):
    plain, zipped = write(tmp_path / "plain", contents), write(tmp_path / "zipped", contents, zipped=True)
    assert_same(load("mnist", plain), load("mnist", zipped))


BROKEN_FILES = {
    "cut short": (TRAIN_IMAGES, lambda data: data[:-1], "15679 bytes after the header; wants 15680"),
    "too long": (TEST_LABELS, lambda data: data + b"\0", "more bytes after the header; wants 10"),
    "empty": (TEST_IMAGES, lambda data: b"", "0 bytes; wants at least 16"),
    "wrong magic": (TEST_LABELS, lambda data: idx(np.arange(10), 0x0B01), "0x00000b01; wants 0x00000801"),
    "labels for images": (TEST_IMAGES, lambda data: idx(np.arange(20)), "0x00000801; wants 0x00000803"),
    "wrong image size": (TEST_IMAGES, lambda data: idx(np.zeros((10, 32, 32))), r"\(32, 32\); wants \(28, 28\)"),
    "no images": (TRAIN_IMAGES, lambda data: idx(np.zeros((0, 28, 28))), "0 items; wants at least 1"),
    "too few labels": (TRAIN_LABELS, lambda data: idx(np.zeros(19)), "19 labels; wants 20"),
    "label out of range": (TRAIN_LABELS, lambda data: idx([*range(19), 3]), "label 18; wants labels from 0 to 9"),
}


@pytest.mark.parametrize(("file", "damage", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_is_refused_by_name(file, damage, message, tmp_path, contents):
    contents[file] = damage(contents[file])
    with pytest.raises(ValueError, match=f"{file}: .*{message}"):
        load("mnist", write(tmp_path, contents))


GZIP_DAMAGE = {
    "cut short": lambda data: data[:-20],
    "flipped bytes": lambda data: data[:60] + bytes(byte ^ 0xFF for byte in data[60:80]) + data[80:],
    "not gzip": lambda data: b"<html>no such file</html>",
    "followed by zeros": lambda data: data + bytes(10**6),
}


@pytest.mark.parametrize("damage", GZIP_DAMAGE.values(), ids=GZIP_DAMAGE)
def test_a_damaged_gzip_file_is_refused_by_name(damage, tmp_path, contents):
    path = write(tmp_path, contents, zipped=True) / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path.name}: .*wants a whole gzip file"):
        load("mnist", tmp_path)


BOMBS = {
    "more than its header says": (np.array([0x0801, 10], ">u4"), "more bytes after the header; wants 10"),
    "a header of a terabyte": (np.array([0x0801, 2**32 - 1], ">u4"), "4294967295 items; .* at most 1000000"),
}


@pytest.mark.parametrize(("header", "message"), BOMBS.values(), ids=BOMBS)
def test_a_gzip_bomb_is_refused_before_it_goes_off(header, message, tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(header.tobytes() + bytes(2**26)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{path.name}: .*{message}"):
        datasets.read_idx(path, ())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size < 2**17 and peak < 2**21


def test_a_large_plain_file_is_refused_by_its_header(tmp_path, contents):
    folder = write(tmp_path, contents)
    with (folder / TEST_IMAGES).open("r+b") as file:
        file.truncate(2**26)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{TEST_IMAGES}: has more bytes after the header; wants 7840"):
        load("mnist", folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.parametrize("zip", [bytes, gzip.compress])
def test_a_header_that_claims_gigabytes_takes_no_memory(zip, tmp_path):
    path = tmp_path / ("images.gz" if zip is gzip.compress else "images")
    path.write_bytes(zip(np.array([0x0803, 1_000_000, 28, 28], ">u4").tobytes()))
    tracemalloc.start()
    with pytest.raises(ValueError, match="has 0 bytes after the header; wants 784000000"):
        datasets.read_idx(path, (28, 28))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.parametrize(
    ("header", "piece", "reason"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", b"x", r"sent only \d+ bytes in 0.2 s"),
        (b"HTTP/1.0 200 OK\r\nName: ", b"x", r"sent only 0 bytes in 0.2 s"),
        (b"HTTP/1.0 200 OK\r\n\r\n", b"x" * 20_000, r"sent more than 100,000 bytes"),
        (b"no header\r\n", b"x", r"the answer is no HTTP \(BadStatusLine"),
    ],
    ids=["slow", "slow header", "endless", "no header"],
)
def test_a_bad_mirror_is_given_up(tmp_path, monkeypatch, header, piece, reason):
    class Drip(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                self.wfile.write(header)
                while True:
                    self.wfile.write(piece)
                    time.sleep(0.01)

        def log_message(self, *args):
            pass

    monkeypatch.setattr(datasets, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(datasets, "MOST_BYTES", 100_000)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        with pytest.raises(FileNotFoundError, match=reason):
            load("mnist", tmp_path / "cache", mirrors=[f"http://127.0.0.1:{server.server_port}/"])
        server.shutdown()
    assert not (tmp_path / "cache").exists()


def test_without_a_home_folder_the_error_says_what_is_wanted(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(datasets.Path, "home", home)
    with pytest.raises(ValueError, match=r"home directory; wants the folder of the data, data_dir, or"):
        load("mnist")


def test_every_mirror_is_asked_over_https():
    assert [url for urls in datasets.MIRRORS.values() for url in urls if not url.startswith("https://")] == []


def test_files_of_the_other_dataset_are_refused(tmp_path, contents, monkeypatch):
    folder = write(tmp_path, contents, zipped=True)
    monkeypatch.setattr(datasets, "MD5", {"mnist": {}, "fashion_mnist": md5_of(folder)})
    with pytest.raises(ValueError, match="is a file of fashion_mnist; wants a file of mnist"):
        load("mnist", folder)


def test_missing_files_are_downloaded_once(tmp_path, contents, serve):
    source = write(tmp_path / "source", contents, zipped=True)
    folder = tmp_path / "cache" / "mnist"
    downloaded = load("mnist", folder, mirrors=[serve(source)], md5=md5_of(source))
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{file}.gz" for file in ALL_FILES)
    assert_same(downloaded, load("mnist", source))
    assert_same(downloaded, load("mnist", folder, mirrors=[]))


def test_a_mirror_with_a_wrong_checksum_is_passed_over(tmp_path, contents, serve):
    good = write(tmp_path / "good", contents, zipped=True)
    bad = write(tmp_path / "bad", {**contents, TRAIN_LABELS: idx(np.zeros(20))}, zipped=True)
    downloaded = load("mnist", tmp_path / "cache", mirrors=[serve(bad), serve(good)], md5=md5_of(good))
    assert_same(downloaded, load("mnist", good))


def test_a_mirror_that_does_not_answer_is_passed_over(tmp_path, contents, serve):
    source = write(tmp_path / "source", contents, zipped=True)
    (tmp_path / "empty").mkdir()
    mirrors = ["http://127.0.0.1:1/", serve(tmp_path / "empty"), serve(source)]
    downloaded = load("mnist", tmp_path / "cache", mirrors=mirrors, md5=md5_of(source))
    assert_same(downloaded, load("mnist", source))


def test_a_download_with_a_wrong_checksum_leaves_nothing_behind(tmp_path, contents, serve):
    source, folder = write(tmp_path / "source", contents, zipped=True), tmp_path / "cache"
    wrong = dict.fromkeys(md5_of(source), "0" * 32)
    with pytest.raises(FileNotFoundError, match=f"MD5 .* expected md5:{'0' * 32} but got"):
        load("mnist", folder, mirrors=[serve(source)], md5=wrong)
    assert not folder.exists()


def test_without_files_and_network_the_error_says_what_is_wanted_where(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load("fashion_mnist", tmp_path, mirrors=["http://127.0.0.1:1/"])
    assert all(name in str(error.value) for name in (str(tmp_path), *ALL_FILES))


@pytest.fixture
def batches():
    random = np.random.default_rng(0)
    names = [name for names in CIFAR10_FILES.values() for name in names]
    pixels = {name: random.integers(0, 256, (3, 3072), np.uint8) for name in names}
    return {name: np.insert(p, 0, [i, 9, 3], axis=1).tobytes() for i, (name, p) in enumerate(pixels.items())}


def test_cifar_10s_files_become_scaled_images_and_labels_in_their_order(tmp_path, batches):
    dataset = load("cifar10", write(tmp_path, batches))
    assert dataset.name == "cifar10"
    assert dataset.train_images.shape == (15, 3, 32, 32) and dataset.test_images.shape == (3, 3, 32, 32)
    assert dataset.train_images.dtype == np.float32 and dataset.train_labels.dtype == np.int32
    assert dataset.train_labels.tolist() == [0, 9, 3, 1, 9, 3, 2, 9, 3, 3, 9, 3, 4, 9, 3]
    assert dataset.test_labels.tolist() == [5, 9, 3]
    second = np.frombuffer(batches["data_batch_3.bin"], np.uint8).reshape(3, 3073)[1]
    assert round(float(dataset.train_images[7, 1, 2, 5]) * 255) == second[1 + 1024 + 2 * 32 + 5]


def test_every_dataset_has_the_shape_that_it_is_said_to_have(tmp_path, contents, batches):
    folder = write(tmp_path, contents | batches)
    assert {name: load(name, folder).test_images.shape[1:] for name in IMAGE_SHAPES} == IMAGE_SHAPES


BROKEN_BATCHES = {
    "cut short": (lambda data: data[:-1], "9218 bytes; wants 3073 bytes per image"),
    "too long": (lambda data: data + b"\0", "9220 bytes; wants 3073 bytes per image"),
    "empty": (lambda data: b"", "0 bytes; wants 3073 bytes per image, and 1 to"),
    "label out of range": (lambda data: b"\x0a" + data[1:], "label 10; wants labels from 0 to 9"),
    "of CIFAR-100": (lambda data: bytes(3074) * 3, "9222 bytes; wants 3073"),
}


@pytest.mark.parametrize("name", ["data_batch_5.bin", "test_batch.bin"])
@pytest.mark.parametrize(("damage", "message"), BROKEN_BATCHES.values(), ids=BROKEN_BATCHES)
def test_a_broken_batch_is_refused_by_name(damage, message, name, tmp_path, batches):
    batches[name] = damage(batches[name])
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        load("cifar10", write(tmp_path, batches))


@pytest.mark.parametrize("name", ["data_batch_1.bin", "test_batch.bin"])
def test_a_missing_batch_is_named_with_where_it_is_wanted(name, tmp_path, batches):
    del batches[name]
    with pytest.raises(FileNotFoundError) as error:
        load("cifar10", write(tmp_path, batches))
    assert str(error.value).startswith(f"{name} is not in {tmp_path}; wants CIFAR-10's") and "data_batch_2" in str(
        error.value
    )

import json

import jax.numpy as jnp
import pytest
from helpers import normal

from pallas_kernels.conv import conv2d_relu_max_pool2d as kernels
from pallas_kernels.core import device, tiles

KERNEL = "conv2d_relu_max_pool2d.weights_gradient"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a file of tiles in place of the package's."""
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiles, "FILE", path)

    def write(text):
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        tiles.tiles.cache_clear()

    yield write
    tiles.tiles.cache_clear()


@pytest.fixture
def kernel(monkeypatch):
    """A tunable function of an array that returns its options."""
    monkeypatch.setattr(tiles, "KERNELS", {})

    @tiles.tunable(rows=(1, 2), columns=(3,))
    def kernel(x, *, window, rows=None, columns=None):
        return rows, columns

    return kernel


def recording(tile, kernel="test_tiles.kernel", shapes="float32 4x128, window=2x2"):
    return {device.kind(): {kernel: {shapes: tile}}}


X = jnp.zeros((4, 128))


def test_what_is_recorded_for_device_and_shapes_is_taken(kernel, file):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(X, window=(2, 2)) == (2, 3)


@pytest.mark.parametrize("shape", [(4, 256), (5, 128)])
def test_other_shapes_are_left_to_the_kernels_own_rule(kernel, file, shape):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(jnp.zeros(shape), window=(2, 2)) == (None, None)
    assert kernel(X, window=(2, 1)) == (None, None)


def test_an_unknown_device_is_left_to_the_kernels_own_rule(kernel, file, monkeypatch):
    file(recording({"rows": 2, "columns": 3}))
    monkeypatch.setattr(device, "kind", lambda: "NVIDIA H900")
    assert kernel(X, window=(2, 2)) == (None, None)


def test_a_tile_that_is_asked_for_goes_before_what_is_recorded(kernel, file):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(X, window=(2, 2), rows=1) == (1, None)


@pytest.mark.parametrize("tile", [{"rows": 2}, {"rows": 2, "columns": 0}, {"rows": 2, "columns": "3"}, {"cows": 2}])
def test_a_tile_that_is_not_one_is_refused_with_file_kernel_and_shapes(kernel, file, tile):
    file(recording(tile))
    with pytest.raises(ValueError, match=r"tiles.json: test_tiles.kernel has .* at float32 4x128, window=2x2; wants"):
        kernel(X, window=(2, 2))


def test_a_file_that_is_no_json_is_refused_by_name(kernel, file):
    file("{")
    with pytest.raises(ValueError, match=r"tiles.json is not the JSON"):
        kernel(X, window=(2, 2))


def test_a_recorded_tile_that_does_not_divide_is_refused(file):
    dy, x = normal((4, 1, 1, 128), (1, 2, 2, 128))
    place = jnp.zeros(dy.shape, jnp.uint8)
    file(recording({"ks": 3, "parts": 1}, KERNEL, tiles.key(dy, place, x, window=(1, 1))))
    with pytest.raises(ValueError, match=f"{KERNEL}: ks is 3; wants a divisor of 4"):
        kernels.weights_gradient(dy, place, x, window=(1, 1))


def test_the_packages_file_is_read_and_every_tile_in_it_names_a_kernel_and_its_sizes():
    for kernels_of in tiles.tiles(tiles.FILE).values():
        for name, recorded in kernels_of.items():
            assert all(tile.keys() == tiles.KERNELS[name].sweep.keys() for tile in recorded.values())


def test_the_key_says_a_dtype_where_it_changes():
    places = jnp.zeros((4, 128), jnp.uint8)
    assert tiles.key(X, X, places, X, window=(2, 1), n=3) == (
        "float32 4x128 4x128 uint8 4x128 float32 4x128, n=3, window=2x1"
    )

import dataclasses
import json

import jax.numpy as jnp
import pytest
from helpers import normal

from pallas_kernels.conv import conv2d_relu_max_pool2d as kernels
from pallas_kernels.core import device, tiles
from pallas_kernels.core.device import BLACKWELL, HOPPER, targeting

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


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    columns: int
    stages: int = 4


RULE = Config(rows=8, columns=9)


def supports(x, *, window):
    return f"window={window}" if window == (3, 3) else None


def heuristic(x, *, window):
    return RULE if x.size > 1 else None


@pytest.fixture
def kernel(monkeypatch):
    """A kernel of an array that returns its config."""
    monkeypatch.setattr(tiles, "KERNELS", {})

    @tiles.kernel(supports=supports, heuristic=heuristic, sweep={"rows": (1, 2), "columns": (3,)})
    def kernel(x, *, window, config):
        """Returns its config."""
        return config

    return kernel


def recording(tile, kernel="test_tiles.kernel", shapes="float32 4x128, window=2x2"):
    return {device.kind(): {kernel: {shapes: tile}}}


X = jnp.zeros((4, 128))


def test_what_is_recorded_for_device_and_shapes_is_taken(kernel, file):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(X, window=(2, 2)) == kernel.config(X, window=(2, 2)) == Config(2, 3)


@pytest.mark.parametrize("shape", [(4, 256), (5, 128)])
def test_other_shapes_are_left_to_the_heuristic(kernel, file, shape):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(jnp.zeros(shape), window=(2, 2)) == RULE
    assert kernel(X, window=(2, 1)) == RULE


def test_another_device_is_left_to_the_heuristic(kernel, file):
    file(recording({"rows": 2, "columns": 3}))
    with targeting(BLACKWELL):
        assert kernel(X, window=(2, 2)) == RULE


def test_a_config_that_is_asked_for_goes_before_what_is_recorded(kernel, file):
    file(recording({"rows": 2, "columns": 3}))
    assert kernel(X, window=(2, 2), config=Config(1, 1)) == Config(1, 1)


def test_what_a_kernel_does_not_take_is_refused_by_name(kernel):
    assert kernel.supports(X, window=(3, 3)) == "window=(3, 3)"
    assert not kernel.pays(X, window=(3, 3))
    with pytest.raises(NotImplementedError, match=r"^test_tiles.kernel: does not take window=\(3, 3\)$"):
        kernel(X, window=(3, 3), config=RULE)


def test_where_a_kernel_does_not_pay_it_wants_a_config(kernel):
    one = jnp.zeros(1)
    assert kernel.supports(one, window=(2, 2)) is None
    assert kernel.pays(X, window=(2, 2)) and not kernel.pays(one, window=(2, 2))
    with pytest.raises(
        NotImplementedError, match=r"^test_tiles.kernel: has no config for float32 1, window=2x2; wants"
    ):
        kernel(one, window=(2, 2))
    assert kernel(one, window=(2, 2), config=RULE) == RULE


@pytest.mark.parametrize(
    ("written_for", "found", "reason"),
    [
        (None, (9, 0), None),
        (None, (12, 0), None),
        (None, (8, 0), "compute capability 8.0, at least 9.0"),
        ((9, 0), (9, 0), None),
        ((9, 0), (10, 0), "compute capability 10.0, only 9.0"),
        ((9, 0), (8, 9), "compute capability 8.9, only 9.0"),
    ],
)
def test_a_kernel_refuses_architectures_that_it_is_not_written_for(written_for, found, reason, monkeypatch):
    monkeypatch.setattr(tiles, "KERNELS", {})
    kernel = tiles.kernel(heuristic=lambda x: RULE, capability=written_for)(lambda x, *, config: config)
    with targeting(dataclasses.replace(HOPPER, capability=found)):
        assert kernel.supports(X) == reason


def test_kernels_are_listed_by_file_and_function(kernel):
    assert {"test_tiles.kernel": kernel} == tiles.KERNELS
    assert (kernel.__name__, kernel.__doc__) == ("kernel", "Returns its config.")


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
    tile = {"channels": 3, "windows": 1, "programs_per_multiprocessor": 1}
    file(recording(tile, KERNEL, tiles.key(dy, place, x, window=(1, 1))))
    with pytest.raises(ValueError, match=f"{KERNEL}: channels is 3; wants a divisor of 4"):
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

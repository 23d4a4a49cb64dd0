"""Kernels kept between processes: what is found again, and above all what is not."""

import contextlib
import functools
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from helpers import ENTRIES, case_of, cuda_program, op_of, results_of, value_and_gradients
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from planted import double, rows, run

from pallas_kernels.core import device, kept_kernels, launch
from pallas_kernels.core.layouts import LANES
from pallas_kernels.pointwise.elementwise import elementwise

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where kernels are kept; functions of `planted` and of this file count as the library's."""
    for roots in ("_KNOWN_ROOTS", "_OWN_ROOTS"):
        own = {planted.__name__, __name__.partition(".")[0]}
        monkeypatch.setattr(kept_kernels, roots, getattr(kept_kernels, roots) | own)
    monkeypatch.setattr(kept_kernels, "_of_this_process", {})
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / kept_kernels.FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def lowered(monkeypatch):
    """The functions that were lowered and not found."""
    functions, lower = [], launch.lowered

    def record(function, avals):
        functions.append(function)
        return lower(function, avals)

    monkeypatch.setattr(launch, "lowered", record)
    return functions


def in_a_new_process():
    kept_kernels._of_this_process.clear()
    jax.clear_caches()


def program(body=double, **options):
    return cuda_program(lambda x: run(body, x, **options), rows())


def times(x_ref, y_ref, *, i, factor):
    y_ref[i, pl.ds(0, LANES)] = factor * x_ref[i, pl.ds(0, LANES)]


def test_a_kernel_is_lowered_once_and_then_found(folder, lowered):
    first = program()
    in_a_new_process()
    assert program() == first
    assert "mosaic_gpu" in first
    assert len(lowered) == len(list(folder.iterdir())) == 1


def test_a_kernel_launched_twice_in_a_program_is_one(folder, lowered):
    first = cuda_program(lambda x: run(double, run(double, x)), rows())
    in_a_new_process()
    assert cuda_program(lambda x: run(double, run(double, x)), rows()) == first
    assert len(lowered) == 1


def closure(factor):
    return lambda x_ref, y_ref, *, i: times(x_ref, y_ref, i=i, factor=factor)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: program(), lambda: program(programs=1)),
        (lambda: program(), lambda: program(shape=(3, LANES))),
        (lambda: program(functools.partial(times, factor=2)), lambda: program(functools.partial(times, factor=3))),
        (lambda: program(closure(2)), lambda: program(closure(3))),
        (
            lambda: program(lambda x, y, *, i: times(x, y, i=i, factor=2)),
            lambda: program(lambda x, y, *, i: times(x, y, i=i, factor=3)),
        ),
        (lambda: program(), lambda: cuda_program(jax.vmap(lambda x: run(double, x)), rows()[None])),
    ],
    ids=["grid", "shape", "bound", "closure", "lambda", "vmap"],
)
@pytest.mark.usefixtures("folder")
def test_kernels_that_differ_are_not_taken_for_each_other(one, other, lowered):
    results = []
    for _ in range(2):
        in_a_new_process()
        results.append((one(), other()))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
    assert len(lowered) == 2


def _other_version(monkeypatch):
    monkeypatch.setattr(kept_kernels, "_versions", lambda: ("another version",))


def _other_device(monkeypatch):
    monkeypatch.setattr(device, "target", lambda: device.BLACKWELL)


@pytest.mark.parametrize("change", [_other_version, _other_device])
@pytest.mark.usefixtures("folder")
def test_a_kernel_is_lowered_anew_for_another_version_or_device(change, monkeypatch, lowered):
    program()
    change(monkeypatch)
    in_a_new_process()
    program()
    assert len(lowered) == 2


@pytest.mark.parametrize(
    "context",
    [lambda: jax.enable_x64(True), lambda: jax.default_matmul_precision("bfloat16"), lambda: jax.debug_nans(True)],
    ids=["x64", "precision", "nans"],
)
@pytest.mark.usefixtures("folder")
def test_a_kernel_is_lowered_anew_under_other_settings(context, lowered):
    x = jax.ShapeDtypeStruct((2, LANES), jnp.float32)
    body = functools.partial(times, factor=np.float32(2))
    cuda_program(lambda x: run(body, x), x)
    in_a_new_process()
    with context():
        cuda_program(lambda x: run(body, x), x)
    assert len(lowered) == 2


class Scaled:
    """A body as an object, whose class a notebook may change."""

    factor = np.float32(2)

    def __call__(self, x_ref, y_ref, *, i):
        times(x_ref, y_ref, i=i, factor=self.factor)


def helped(x_ref, y_ref, *, i):
    HELPERS["helper"](x_ref, y_ref, i=i)


def helped_by_a_module(x_ref, y_ref, *, i):
    planted.double(x_ref, y_ref, i=i)


def of_a_notebook(x_ref, y_ref, *, i):
    times(x_ref, y_ref, i=i, factor=5)


HELPERS = {"helper": functools.partial(times, factor=2)}


@pytest.mark.parametrize(
    ("body", "replace"),
    [
        (Scaled(), lambda patch: patch.setattr(Scaled, "factor", np.float32(3))),
        (Scaled(), lambda patch: patch.setattr(Scaled, "__call__", lambda _, *refs, i: of_a_notebook(*refs, i=i))),
        (helped, lambda patch: patch.setitem(HELPERS, "helper", functools.partial(times, factor=3))),
        (helped_by_a_module, lambda patch: patch.setattr(planted, "double", of_a_notebook)),
    ],
    ids=["attribute", "method", "constant", "module"],
)
@pytest.mark.usefixtures("folder")
def test_what_is_replaced_at_run_time_counts(body, replace, monkeypatch, lowered):
    first = program(body)
    replace(monkeypatch)
    jax.clear_caches()
    assert program(body) != first
    assert len(lowered) == 2


def of_the_library(x_ref, y_ref, *, i):
    double(x_ref, y_ref, i=i)


@pytest.mark.parametrize("name", ["statistics", "my_module"])
def test_a_function_of_another_module_counts_as_such(name, folder, monkeypatch):
    """Also one in a file that is named as one of Python's, and one that wraps a function of the library's."""
    module = types.ModuleType(name)
    module.__file__ = f"/somewhere/{name}.py"
    text = "def body(x_ref, y_ref, *, i): of_the_library(x_ref, y_ref, i=i)"
    exec(text, vars(module) | {"of_the_library": of_the_library}, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    kept_kernels._is_genuine.cache_clear()
    module.body.__module__ = name
    for body in (module.body, functools.wraps(of_the_library)(module.body)):
        assert "mosaic_gpu" in program(body)
    assert not folder.exists()
    kept_kernels._is_genuine.cache_clear()


def made(factor):
    class Made:
        def __call__(self, x_ref, y_ref, *, i):
            times(x_ref, y_ref, i=i, factor=factor)

    return Made()


@pytest.mark.usefixtures("folder")
def test_classes_of_one_place_are_told_apart(lowered):
    assert program(made(2)) != program(made(3))
    assert len(lowered) == 2


def test_nothing_is_kept_when_the_source_has_changed_since_it_was_imported(folder, monkeypatch):
    monkeypatch.setattr(kept_kernels, "_IMPORTED_AT", 0.0)
    kept_kernels._versions.cache_clear()  # which then has nothing to remember
    assert "mosaic_gpu" in program()
    assert not folder.exists()


@pytest.mark.usefixtures("folder")
def test_settings_of_places_do_not_count(lowered):
    program()
    in_a_new_process()
    with jax.log_compiles(True):
        program()
    assert len(lowered) == 1


def test_the_source_is_that_of_both_packages(monkeypatch, tmp_path):
    sources = [tmp_path / name for name in ("pallas_kernels", "jaxbp")]
    for source in sources:
        source.mkdir()
        (source / "some.py").write_text("a = 1")
    monkeypatch.setattr(kept_kernels, "_SOURCES", sources)
    monkeypatch.setattr(kept_kernels, "_IMPORTED_AT", math.inf)
    versions = {repr(kept_kernels._versions.__wrapped__())}
    for source in sources:
        (source / "some.py").write_text("a = 2")
        versions.add(repr(kept_kernels._versions.__wrapped__()))
    assert len(versions) == 3


def test_a_formula_from_elsewhere_is_lowered_each_time(monkeypatch, folder):
    monkeypatch.setattr(kept_kernels, "_KNOWN_ROOTS", kept_kernels._KNOWN_ROOTS - {__name__.partition(".")[0]})

    def formula(x):
        return 2 * x

    text = cuda_program(lambda x: elementwise(formula, x), rows())
    assert "mosaic_gpu" in text
    assert not folder.exists()


def with_a_bit_flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("damage", [lambda a: a[:100], lambda a: a[:-5], with_a_bit_flipped, lambda a: b""])
def test_a_damaged_file_is_written_again(folder, lowered, damage):
    first = program()
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    in_a_new_process()
    with pytest.warns(UserWarning, match="is damaged"):
        assert program() == first
    in_a_new_process()
    assert program() == first
    assert len(lowered) == 2


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Auto)])
@pytest.mark.parametrize("mesh_first", [False, True])
def test_under_a_mesh_it_is_the_same_kernel(folder, lowered, kinds, mesh_first):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    for on_mesh in (mesh_first, not mesh_first):
        in_a_new_process()
        with jax.set_mesh(mesh) if on_mesh else contextlib.nullcontext():
            assert "mosaic_gpu" in program()
    assert len(lowered) == len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_only_warns(folder, lowered):
    folder.write_text("no folder")
    with pytest.warns(UserWarning, match="kernels are not kept in"):
        assert "mosaic_gpu" in program()
    assert len(lowered) == 1


def test_nothing_is_kept_without_a_folder_or_the_package(folder, monkeypatch):
    monkeypatch.setattr(kept_kernels.importlib.util, "find_spec", lambda name: None)
    without_package = program()
    jax.config.update("jax_compilation_cache_dir", None)
    assert program() == without_package
    assert not folder.exists()


@pytest.mark.parametrize("other", [dict(platforms=("cpu", "cuda")), dict(platforms=("cpu",)), dict(for_export=True)])
def test_programs_for_other_platforms_or_for_export_keep_nothing(folder, other):
    def context(platforms=("cuda",), for_export=False):
        return SimpleNamespace(platforms=platforms, lowering_parameters=SimpleNamespace(for_export=for_export))

    assert kept_kernels.folder(context()) == folder
    assert kept_kernels.folder(context(**other)) is None


def launches(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "launch":
            yield equation.params["cuda"], [v.aval for v in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            yield from launches(inner)


def keys_of(name):
    op, arrays = op_of(name, None, "pallas"), case_of(name, None).structs(batch=2, dtype=jnp.dtype("float32"))
    if "_backward" not in name:
        op, arrays = value_and_gradients(op), (arrays, results_of(op, arrays))
    return [kept_kernels._key(*each) for each in launches(jax.make_jaxpr(op)(*arrays).jaxpr)]


@pytest.mark.parametrize("name", sorted(name for name, entry in ENTRIES.items() if not entry.like))
def test_every_kernel_of_the_library_can_be_kept(name):
    assert None not in keys_of(name)


SCRIPT = """
from test_kept_kernels import keys_of
for name in ("automaton_rollout", "conv2d_relu_max_pool2d", "gate_layer", "layer_norm_linear", "softmax_cross_entropy"):
    print(name, *keys_of(name))
"""


@pytest.mark.once
def test_another_process_looks_for_the_same_files():
    outputs = []
    for seed in ("1", "2"):
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].split()) > 15

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, last_program_first, normal, on_the_cpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from planted import FIRST, double, rows, run

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.mosaic import query_ptxas_once
from pallas_kernels.core.simulator import simulated

ROOT = Path(__file__).parents[3]
SECOND = pl.ds(LANES, LANES)

pytestmark = pytest.mark.usefixtures("in_an_interpreter")


SCRIPT = """
import jax, jax.numpy as jnp, jaxbp
x = jnp.ones((2, 3))
jaxbp.relu(x)
print("before")
for _ in range(2):
    jax.grad(lambda x: jaxbp.relu(x, implementation="pallas").sum())(x)
    jax.grad(lambda x: jaxbp.linear(x, x, implementation="pallas").sum())(x)
"""


def test_the_interpreter_warns_once_per_process_and_only_when_it_runs():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "always", "-c", SCRIPT]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.returncode == 0, process.stdout
    before, after = process.stdout.split("before\n")
    assert "no GPU found" not in before
    assert after.count("jaxbp: no GPU found, so Pallas kernels run in an interpreter: correct, but slow.") == 1


def counted(traced):
    def body(x_ref, y_ref, *, i):
        traced.append(i)
        y_ref[i, FIRST] = 2 * x_ref[i, FIRST]

    return jax.jit(lambda x: run(body, x))


def test_a_body_is_traced_when_it_is_lowered_and_for_that_platform_alone():
    traced = []
    program = counted(traced).trace(rows())
    assert not traced
    assert "planted" in str(program.jaxpr)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()
    assert len(traced) == 1
    np.testing.assert_array_equal(program.lower(lowering_platforms=("cpu",)).compile()(rows()), 2 * rows())
    assert len(traced) == 2


def test_a_body_traced_under_x64_has_its_types_where_it_is_lowered_outside():
    types = []

    def body(x_ref, y_ref, *, i):
        types.append(jnp.zeros(()).dtype)
        y_ref[i, FIRST] = x_ref[i, FIRST]

    x = rows()
    with jax.enable_x64(True):
        program = jax.jit(lambda x: run(body, x)).trace(x)
    program.lower(lowering_platforms=("cuda",))
    assert types == [jnp.float64]


def test_conversions_to_and_from_few_bits_ask_for_the_version_of_ptxas_once(monkeypatch):
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append("version") or 90)
    library = "jax.experimental.mosaic.gpu.fragmented_array.mgpu_lib"
    monkeypatch.setattr(library, SimpleNamespace(_mosaic_gpu_ext=extension), raising=False)
    query_ptxas_once.cache_clear()

    def body(x_ref, y_ref, *, i):
        y_ref[i, FIRST] = x_ref[i, FIRST].astype(jnp.int8).astype(jnp.float32)

    cuda_program(lambda x: run(body, x), rows().astype(jnp.int32))
    query_ptxas_once.cache_clear()
    assert asked == ["version"]


def test_a_weak_type_does_not_change_what_a_body_computes():
    dtypes = []

    def body(x_ref, h_ref, y_ref, *, i):
        product = x_ref[i, FIRST] * h_ref[i, FIRST]
        dtypes.append(product.dtype)
        y_ref[i, FIRST] = product.astype(y_ref.dtype)

    half = rows().astype(jnp.bfloat16)
    results = [run(body, x, half) for x in (jnp.full((2, LANES), 1.01), jnp.full((2, LANES), jnp.float32(1.01)))]
    assert jax.typeof(jnp.full((2, LANES), 1.01)).weak_type and set(dtypes) == {jnp.dtype("float32")}
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_runs_the_kernel_on_every_example(axis):
    x = jnp.stack([rows(), 1 + rows(), 2 - rows()], axis)
    y = jax.vmap(lambda x: run(double, x), axis)(x)
    np.testing.assert_array_equal(y, 2 * jnp.moveaxis(x, axis, 0))
    assert "mosaic_gpu" in cuda_program(jax.vmap(lambda x: run(double, x), axis), x)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 1)])
def test_vmap_launches_a_kernel_with_semaphores_once_per_example(in_axes):
    def add(x_ref, z_ref, y_ref, *, i, semaphores):
        if semaphores is not None:  # a second example would not find 0
            plgpu.semaphore_signal(semaphores.at[i])
            plgpu.semaphore_wait(semaphores.at[i], 1)
        y_ref[i, FIRST] = x_ref[i, FIRST] + z_ref[i, FIRST]

    def added(x, z):
        return launch(add, x, z, out=rows(), grid={"i": 2}, name="planted", semaphores=2)

    arrays = [rows() if axis is None else jnp.stack([rows(), 1 + rows()], axis) for axis in in_axes]
    np.testing.assert_array_equal(jax.vmap(added, in_axes)(*arrays), jnp.stack([2 * rows(), 1 + 2 * rows()]))
    assert "stablehlo.while" not in cuda_program(added, rows(), rows())
    program = cuda_program(jax.vmap(added, in_axes), *arrays)
    assert program.count("stablehlo.while") == 1 == program.count("custom_call @mosaic_gpu")


def test_an_example_that_is_the_same_for_all_is_not_copied_by_vmap():
    def add(x_ref, z_ref, y_ref, *, i):
        y_ref[i, FIRST] = x_ref[i, FIRST] + z_ref[i, FIRST]

    x = jnp.stack([rows(), 1 + rows()])
    y = jax.vmap(lambda x, z: run(add, x, z), (0, None))(x, rows())
    np.testing.assert_array_equal(y, x + rows())


def doubled_and_half(x):
    """Compute x / 2 and 2 x, where 2 x may reuse x's memory."""

    def body(x_ref, half_ref, double_ref, *, i):
        value = x_ref[i]
        half_ref[i] = 0.5 * value
        double_ref[i] = 2.0 * value

    return launch(body, x, out=(x, x), grid={"i": x.shape[0]}, in_place={0: 1}, name="doubled_and_half")


def test_a_result_may_take_the_place_of_an_array():
    x = jnp.arange(3.0 * LANES).reshape(3, LANES)
    np.testing.assert_array_equal(doubled_and_half(x), (x / 2, 2 * x))
    np.testing.assert_array_equal(jax.vmap(doubled_and_half)(x[None]), (x[None] / 2, 2 * x[None]))
    in_place = jax.__version_info__ >= (0, 11)  # older versions allocate new memory
    assert cuda_program(doubled_and_half, x).count("#stablehlo.output_operand_alias") == in_place
    assert "output_operand_alias" not in cuda_program(jax.vmap(doubled_and_half), x[None])
    assert cuda_program(doubled_and_half, x).count("optimization_barrier") == 2 * in_place


@pytest.mark.gpu
def test_a_result_in_the_place_of_an_array_that_is_still_needed():
    x = jnp.arange(3.0 * LANES).reshape(3, LANES)
    results = jax.jit(lambda x: (*doubled_and_half(x + 1), x + 1))(x)
    np.testing.assert_array_equal(results, ((x + 1) / 2, 2 * (x + 1), x + 1))


@pytest.mark.gpu
def test_a_result_in_the_place_of_a_slice_and_in_a_slice_of_another_array():
    x = jnp.arange(8.0 * LANES).reshape(8, LANES)

    @jax.jit
    def run(x, start):
        x, updated = x + 1, jnp.zeros_like(x)
        double = lambda part: doubled_and_half(part)[1]  # noqa: E731
        updated = jax.lax.dynamic_update_slice(updated, double(x[2:5]), (start, 0))
        return (
            x,
            double(x[2:5]),
            updated,
            jax.lax.scan(lambda _, part: (None, double(part)), None, x.reshape(4, 2, -1))[1],
        )

    whole, part, updated, scanned = run(x, 4)
    np.testing.assert_array_equal(whole, x + 1)
    np.testing.assert_array_equal(part, 2 * whole[2:5])
    np.testing.assert_array_equal(updated, jnp.zeros_like(x).at[4:7].set(part))
    np.testing.assert_array_equal(scanned.reshape(x.shape), 2 * whole)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_body_gets_references_in_the_structure_of_the_arrays_and_results(has_bias):
    def body(factors, bias_ref, x_ref, y_refs, none, *, i):
        assert none is None and (bias_ref is not None) == has_bias
        for factor_ref, y_ref in zip(factors, y_refs, strict=True):
            y = factor_ref[0] * x_ref[i, FIRST]
            y_ref[i, FIRST] = y + bias_ref[0] if has_bias else y

    x, factors, bias = rows(), [jnp.full(1, 2.0), jnp.full(1, 3.0)], jnp.ones(1) if has_bias else None
    run = lambda x: launch(body, factors, bias, x, out=((x, x), None), grid={"i": 2}, name="planted")  # noqa: E731
    results, none = run(x)
    assert none is None
    np.testing.assert_array_equal(results, (2 * x + has_bias, 3 * x + has_bias))
    assert "mosaic_gpu" in cuda_program(run, x)


def test_barriers_want_a_gpu_or_the_simulator():
    def body(x_ref, y_ref, scratch, *, i):
        y_ref[i, FIRST] = x_ref[i, FIRST]

    scratch = [plgpu.SMEM((LANES,), jnp.float32), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct((2, LANES), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"^planted: uses barriers, which the interpreter lacks"):
        launch(body, rows(), out=out, grid={"i": 2}, name="planted", scratch=scratch)


def all_write_the_same_place(x_ref, y_ref, *, i):
    y_ref[0, FIRST] = x_ref[i, FIRST]
    y_ref[1, FIRST] = x_ref[1, FIRST]


def write_over_each_other_in_turn(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = x_ref[i, FIRST]
    y_ref[1 - i, FIRST] = x_ref[i, FIRST]


def reads_what_another_wrote(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = jnp.where(i == 0, x_ref[0, FIRST], y_ref[0, FIRST])


@pytest.mark.parametrize("body", [all_write_the_same_place, write_over_each_other_in_turn, reads_what_another_wrote])
def test_running_the_last_program_first_shows_a_race(body):
    in_order = run(body, rows())
    with last_program_first():
        last_first = run(body, rows())
    assert not np.array_equal(in_order, last_first)


def test_running_the_last_program_first_changes_nothing_in_a_right_kernel():
    with last_program_first():
        np.testing.assert_array_equal(run(double, rows()), 2 * rows())


def double_and_square(x, traced):
    """Return 2x, and the pair (x², x³). The kernel can skip either."""

    def body(x_ref, double_ref, powers, *, i):
        traced.append((double_ref is not None, powers is not None))
        if double_ref is not None:
            double_ref[FIRST] = 2 * x_ref[FIRST]
        if powers is not None:
            powers[0][FIRST], powers[1][FIRST] = x_ref[FIRST] ** 2, x_ref[FIRST] ** 3

    return launch(body, x, out=(x, [x, x]), grid={"i": 1}, name="powers", skippable=[0, 1])


@pytest.mark.parametrize(
    ("use", "written"),
    [
        (lambda double, powers: (double, powers), (True, True)),
        (lambda double, powers: double, (True, False)),
        (lambda double, powers: powers[1], (False, True)),
    ],
    ids=["both", "the first", "half of the second"],
)
@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, jax.vmap, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x[None])],
    ids=["plain", "jit", "vmap", "checkpoint", "map"],
)
def test_a_compiled_program_skips_outputs_that_it_does_not_use(use, written, transform):
    traced, x = [], jnp.arange(LANES, dtype=jnp.float32)
    x = x[None] if transform is jax.vmap else x
    found = jax.jit(lambda x: use(*transform(lambda x: double_and_square(x, traced))(x)))(x)
    assert set(traced) == {written}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(use(2 * x, [x**2, x**3])), strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-6)


def test_a_kernel_that_skips_outputs_lowers_for_cuda_without_them():
    program = cuda_program(lambda x: double_and_square(x, [])[0], jnp.ones(LANES))
    (call,) = [line for line in program.splitlines() if "mosaic_gpu" in line]
    assert call.rstrip().endswith(f"-> tensor<{LANES}xf32>")


def test_a_kernel_with_outputs_in_place_cannot_skip_others():
    x = jnp.ones(LANES)
    with pytest.raises(ValueError, match=r"^change: skippable is \[0\]; wants an empty sequence, because in_place"):
        launch(lambda *refs, i: None, x, out=(x,), grid={"i": 1}, name="change", in_place={0: 0}, skippable=[0])


def indices_of_ctas():
    def body(x_ref, y_ref, *, i, j, k):
        for axis, index in enumerate((i, j, k)):
            y_ref[i, j, k, axis] = index.astype(jnp.int32)

    x = jnp.ones(LANES)
    return launch(body, x, out=jax.ShapeDtypeStruct((2, 3, 4, 3), jnp.int32), grid=dict(i=2, j=3, k=4), name="indices")


def test_a_grid_with_too_many_ctas_along_its_outer_axes_is_flattened(monkeypatch):
    monkeypatch.setattr("pallas_kernels.core.launch._MAX_OUTER_CTAS", 5)
    with on_the_cpu(), simulated():
        np.testing.assert_array_equal(indices_of_ctas(), np.moveaxis(np.indices((2, 3, 4)), 0, -1))


@pytest.mark.gpu
def test_gpu_a_grid_may_have_more_ctas_than_cuda_takes_along_its_outer_axes():
    def body(x_ref, y_ref, *, row, block):
        columns = pl.ds(block * LANES, LANES)
        y_ref[row, columns] = 2 * x_ref[row, columns]

    (x,) = normal((70_000, 2 * LANES))
    y = launch(body, x, out=x, grid={"row": len(x), "block": 2}, name="double")
    np.testing.assert_array_equal(y, 2 * x)


def test_the_error_of_a_derivative_names_the_kernel_and_the_remedy():
    message = r"JAX cannot differentiate a kernel; wants `jaxbp.differentiable\(kernel, formula\)`"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(lambda x: run(double, x).sum()), rows())

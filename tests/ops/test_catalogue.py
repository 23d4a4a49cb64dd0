"""What every op must do, in every implementation, driven by the table of ops."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, draw_cotangents, float64_reference, floats, is_float, of_floats, value_and_gradients
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxbp
from jaxbp.ops.catalogue import BATCH, CATALOGUE
from pallas_kernels.launch import simulated

every_op = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
every_implementation = pytest.mark.parametrize("implementation", jaxbp.IMPLEMENTATIONS)
every_kernel_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
every_place = pytest.mark.parametrize(
    ("entry", "place"),
    [pytest.param(entry, place, id=f"{entry.name}-{place}") for entry in CATALOGUE for place in entry.real],
)


def test_every_public_op_is_in_the_table():
    takes_implementation = {
        name
        for name in jaxbp.__all__
        if inspect.isfunction(function := getattr(jaxbp, name))
        and "implementation" in inspect.signature(function).parameters
    }
    assert takes_implementation == {entry.name for entry in CATALOGUE}


@every_implementation
@every_op
def test_gradients_of_order_1_and_2_match_finite_differences(entry, implementation):
    arrays = entry.small.draw(0)
    function = of_floats(entry, entry.small, arrays, implementation)
    check_grads(function, floats(arrays), order=2, modes=("rev",), eps=5e-3, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@every_op
def test_formulas_match_finite_differences_in_float64(entry, implementation):
    with jax.enable_x64(True):
        arrays = entry.small.draw(0, dtype=jnp.float64)
        function = of_floats(entry, entry.small, arrays, implementation)
        check_grads(function, floats(arrays), order=2, modes=("rev",), eps=1e-5, atol=1e-7, rtol=1e-7)


@every_implementation
@every_op
def test_forward_over_reverse_equals_reverse_over_reverse(entry, implementation):
    arrays = entry.small.draw(0)
    function = of_floats(entry, entry.small, arrays, implementation)
    values, direction = floats(arrays), floats(entry.small.draw(1))
    gradient = jax.grad(lambda values: sum(jnp.sum(jnp.sin(y)) for y in function(*values)))
    forward_over_reverse = jax.jvp(gradient, (values,), (direction,))[1]
    along = lambda values: sum(jnp.vdot(g, d) for g, d in zip(gradient(values), direction, strict=True))  # noqa: E731
    assert_close(forward_over_reverse, jax.grad(along)(values), "float32")


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@every_kernel_dtype
@every_op
def test_value_and_gradients_match_float64(entry, dtype, implementation):
    arrays = entry.small.draw(2, dtype=jnp.dtype(dtype))
    cotangents = draw_cotangents(entry, entry.small, arrays)
    y, gradients = value_and_gradients(entry, entry.small, arrays, cotangents, implementation)
    assert all(a.dtype == dtype for a in (*y, *gradients))
    assert_close((y, gradients), float64_reference(entry, entry.small, arrays, cotangents), dtype)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@every_place
def test_gradients_at_real_shapes_match_float64(entry, place, implementation):
    _check_against_float64(entry, place, implementation, batch=3, dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "batch"), [("float32", 1), ("float32", 1000), ("bfloat16", 129), ("float16", 129)])
@every_place
def test_gpu_kernels_at_real_shapes_match_float64(entry, place, dtype, batch):
    _poison_memory()
    _check_against_float64(entry, place, "pallas", batch, dtype)


@pytest.mark.gpu
@every_place
def test_gpu_kernels_give_the_same_bits_twice(entry, place):
    case = entry.real[place]
    arrays = case.draw(0, batch=1000)
    cotangents = draw_cotangents(entry, case, arrays)
    once = value_and_gradients(entry, case, arrays, cotangents, "pallas")
    _poison_memory()
    again = value_and_gradients(entry, case, arrays, cotangents, "pallas")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), once, again))


def _check_against_float64(entry, place, implementation, batch, dtype):
    case = entry.real[place]
    arrays = case.draw(3, batch=batch, dtype=jnp.dtype(dtype))
    cotangents = draw_cotangents(entry, case, arrays)
    _, gradients = value_and_gradients(entry, case, arrays, cotangents, implementation)
    assert_close(gradients, float64_reference(entry, case, arrays, cotangents)[1], dtype)


def _poison_memory():
    """Leaves NaN in the memory that the next outputs get, so that one not written shows."""
    jax.block_until_ready([jnp.full(1 << 28, jnp.nan) for _ in range(4)])


@every_kernel_dtype
@every_place
def test_kernels_lower_for_cuda_without_a_gpu(entry, place, dtype):
    case = entry.real[place]

    def value_and_gradients(*arrays):
        y, vjp = jax.vjp(of_floats(entry, case, arrays, "pallas"), *floats(arrays))
        return y, vjp(y)

    structs = case.structs(batch=16384, dtype=jnp.dtype(dtype))
    program = jax.jit(value_and_gradients).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in program


@every_op
def test_kernels_have_no_race_and_write_every_output_in_the_simulator(entry):
    # The simulator raises on a race and on a read out of bounds, and starts outputs as NaN.
    arrays = entry.small.draw(4)
    cotangents = draw_cotangents(entry, entry.small, arrays)
    with simulated():
        y, vjp = jax.vjp(of_floats(entry, entry.small, arrays, "pallas"), *floats(arrays))
        result = (y, list(vjp(cotangents)))
        jax.block_until_ready(result)
    assert_close(result, float64_reference(entry, entry.small, arrays, cotangents), "float32")


@every_op
def test_float64_kernels_are_refused_and_none_falls_back(entry):
    with jax.enable_x64(True):
        arrays = entry.small.draw(0, dtype=jnp.float64)
        with pytest.raises(NotImplementedError, match=r"'pallas' does not take dtype float64"):
            entry.function(*arrays, **entry.small.options, implementation="pallas")
        y = entry.function(*arrays, **entry.small.options)
        assert jax.tree.leaves(y)[0].dtype == jnp.float64


@every_op
def test_unknown_implementation_is_refused(entry):
    with pytest.raises(ValueError, match=r"implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff' or None"):
        entry.function(*entry.small.draw(0), **entry.small.options, implementation="cuda")


# -------------------------------------------------------------------------------------------- under JAX's transformations


def _sum_of_sines(entry, arrays, implementation):
    function = of_floats(entry, entry.small, arrays, implementation)
    return lambda *values: sum(jnp.sum(jnp.sin(y)) for y in function(*values))


def _eager_gradient(entry, arrays, implementation):
    values = floats(arrays)
    return jax.grad(_sum_of_sines(entry, arrays, implementation), tuple(range(len(values))))(*values)


@every_implementation
@every_op
def test_jit_and_checkpoint_give_the_eager_gradient(entry, implementation):
    arrays = entry.small.draw(5)
    expected = _eager_gradient(entry, arrays, implementation)
    loss = jax.checkpoint(_sum_of_sines(entry, arrays, implementation))
    gradient = jax.jit(jax.grad(loss, tuple(range(len(floats(arrays))))))
    assert_close(gradient(*floats(arrays)), expected, "float32")


@every_implementation
@every_op
def test_vmap_and_scan_give_the_gradient_of_each(entry, implementation):
    arrays = entry.small.draw(6)
    values, others = floats(arrays), floats(entry.small.draw(7))
    stacked = [jnp.stack(both) for both in zip(values, others, strict=True)]
    gradient = jax.grad(_sum_of_sines(entry, arrays, implementation), tuple(range(len(values))))
    one_by_one = [gradient(*values), gradient(*others)]
    expected = jax.tree.map(lambda *each: jnp.stack(each), *one_by_one)
    assert_close(jax.jit(jax.vmap(gradient))(*stacked), expected, "float32")
    scanned = jax.jit(lambda *stacked: jax.lax.scan(lambda _, v: (None, gradient(*v)), None, stacked)[1])
    assert_close(scanned(*stacked), expected, "float32")


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices to shard over")
@every_implementation
@every_op
def test_shard_map_over_the_batch_gives_the_gradients_of_the_whole(entry, implementation):
    # Arguments without a batch are the same on every device: their gradients must be summed over the devices.
    case = entry.real[min(entry.real)]
    arrays = case.draw(8, batch=4)
    differentiable = tuple(i for i, a in enumerate(arrays) if is_float(a))
    call = functools.partial(entry.function, **case.options, implementation=implementation)
    sizes = [jax.tree.leaves(jax.eval_shape(call, *case.structs(batch))) for batch in (2, 4)]
    are_examples = [small.shape != large.shape for small, large in zip(*sizes, strict=True)]

    def loss(*arrays):
        out = zip(jax.tree.leaves(call(*arrays)), are_examples, strict=True)
        # Of a sum over the examples only a linear function is the sum of the devices' shares.
        return sum(jnp.sum(y * y if examples else y * jnp.cos(y.size)) for y, examples in out if is_float(y))

    def sharded_loss(*arrays):
        # Pallas' interpreter does not know the types by which shard_map tells what differs between devices.
        check = implementation != "pallas" or jax.default_backend() == "gpu"
        specs = tuple(P("shard") if BATCH in argument.shape else P() for argument in case.arguments)
        mesh = Mesh(jax.devices()[:2], ("shard",))
        share = jax.shard_map(
            lambda *arrays: jax.lax.psum(loss(*arrays), "shard"),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
            check_vma=check,
        )
        return share(*arrays)

    gradients = jax.jit(jax.grad(sharded_loss, differentiable))(*arrays)
    assert_close(gradients, jax.grad(loss, differentiable)(*arrays), "float32")

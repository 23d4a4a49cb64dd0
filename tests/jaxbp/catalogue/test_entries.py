import dataclasses
import functools
import inspect
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BROADCASTING,
    ENTRIES,
    EXTREMES,
    NAN_AT_INFINITY,
    TOLERANCE,
    assert_close,
    assert_launches_as_recorded,
    assert_second_derivatives_match_differences,
    case_of,
    compiled,
    cuda_program,
    dot,
    drawn,
    every_implementation,
    expected_at,
    floats,
    in_float64,
    is_float,
    last_program_first,
    launches,
    launching_program,
    of_floats,
    on_the_cpu,
    op_of,
    ours,
    poison_memory,
    promoting_nothing,
    reference,
    relative_error,
    results_of,
    value_and_gradients,
    with_extreme,
    with_floats,
    wrong_at,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp
from experiments.studies.many_devices import COLLECTIVE, executed
from jaxbp.catalogue import BATCH, CATALOGUE
from jaxbp.pairing import Op
from jaxbp.training.loop import COMPILER_OPTIONS
from pallas_kernels.core.simulator import simulated

DISTINCT = [entry for entry in CATALOGUE if not entry.like]
NAMES = [entry.name for entry in DISTINCT]
PLACES = [(entry.name, place) for entry in DISTINCT for place in entry.real]

PAIRS = [name for name in NAMES if not re.search("_backward|_with_", name)]
"""Ops with a hand-written backward. They call all kernels, and suffice for slow tests."""

every_op = pytest.mark.parametrize("name", NAMES)
every_pair = pytest.mark.parametrize("name", PAIRS)
TWO_KERNELS = ("layer_norm", "gate_layer")
every_formula_and_two_kernels = pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "xla") for name in PAIRS] + [(name, "pallas") for name in TWO_KERNELS],
)
"""Pairs that suffice where a transformation meets the operations of each formula, but only the launch of a kernel."""


def test_every_public_op_is_in_the_table():
    takes_implementation = {
        name
        for name in jaxbp.__all__
        if inspect.isfunction(function := getattr(jaxbp, name))
        and "implementation" in inspect.signature(function).parameters
    }
    assert takes_implementation == {entry.name for entry in CATALOGUE}


def _directions(arrays, count):
    random = np.random.default_rng(0)
    return [[random.standard_normal(a.shape).astype(a.dtype) for a in floats(arrays)] for _ in range(count)]


def _move(arrays, direction, by):
    return with_floats(arrays, [np.asarray(a) + by * d for a, d in zip(floats(arrays), direction, strict=True)])


def _gradient_of_sines(name, implementation, arrays):
    run = compiled(name, None, implementation)
    y, _ = run(arrays, drawn(name, dtype=floats(arrays)[0].dtype.name)[1])
    return [np.asarray(g) for g in run(arrays, [np.cos(a) for a in y])[1]]


@functools.cache
def _hessian_product(name, implementation, forward):
    """Return a program for a product with the Hessian, by forward mode or by reverse mode over reverse mode."""

    @jax.jit
    def run(arrays, direction):
        function, values = of_floats(op_of(name, None, implementation), arrays), floats(arrays)
        gradient = lambda *values: jax.grad(lambda v: sum(jnp.sum(jnp.sin(y)) for y in function(*v)))(values)  # noqa: E731
        if forward:
            return list(jax.jvp(gradient, values, direction)[1])
        return list(jax.vjp(gradient, *values)[1](tuple(direction)))

    return run


@every_op
def test_autodiff_matches_finite_differences(name):
    with jax.enable_x64(True):
        arrays, cotangents = drawn(name, dtype="float64")
        run = compiled(name, None, "autodiff")
        _, gradients = run(arrays, cotangents)
        for direction in _directions(arrays, 4):
            ahead, behind = (run(_move(arrays, direction, by), cotangents)[0] for by in (1e-5, -1e-5))
            difference = (dot(cotangents, ahead) - dot(cotangents, behind)) / 2e-5
            np.testing.assert_allclose(dot(gradients, direction), difference, rtol=1e-7, atol=1e-7)


@every_pair
def test_second_derivatives_of_kernels_match_finite_differences_of_the_gradient(name):
    arrays, _ = drawn(name)
    (direction,) = _directions(arrays, 1)
    ahead, behind = (_gradient_of_sines(name, "pallas", _move(arrays, direction, by)) for by in (1e-3, -1e-3))
    products = _hessian_product(name, "pallas", forward=True)(arrays, direction)
    for product, a, b in zip(products, ahead, behind, strict=True):
        np.testing.assert_allclose(product, (a - b) / 2e-3, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", TWO_KERNELS)
def test_forward_over_reverse_equals_reverse_over_reverse(name):
    # The derivative of a kernel is the derivative of its formula.
    arrays, _ = drawn(name)
    (direction,) = _directions(arrays, 1)
    products = (_hessian_product(name, "pallas", forward)(arrays, direction) for forward in (True, False))
    assert_close(*products, "float32")


@every_pair
def test_first_and_second_derivatives_of_formulas_match_finite_differences(name):
    # Differences are exact in float64, which kernels do not support.
    with jax.enable_x64(True):
        arrays, _ = drawn(name, dtype="float64")
    function = of_floats(op_of(name, None, "xla"), arrays)
    assert_second_derivatives_match_differences({name: function}, {name: floats(arrays)})


@ours
@every_op
def test_value_and_gradients_match_float64(name, implementation):
    _check_at_place(name, None, implementation, "float32", batch=2)


@functools.cache
def _limits(name):
    run, (arrays, cotangents) = compiled(name, None, "autodiff"), drawn(name)
    return {
        (at, extreme): expected_at(extreme, lambda x, at=at: in_float64(run, with_extreme(arrays, at, x), cotangents))
        for at in range(len(floats(arrays)))
        for extreme in EXTREMES
    }


@ours
@every_pair
def test_values_and_gradients_at_zeros_infinities_nan_and_the_largest_number_are_limits(name, implementation):
    run, (arrays, cotangents), with_nan = compiled(name, None, implementation), drawn(name), False
    for (at, extreme), expected in _limits(name).items():
        found = run(with_extreme(arrays, at, EXTREMES[extreme]), cotangents)
        with_nan |= bool(wrong_at(extreme, found, expected))
        assert wrong_at(extreme, found, expected, name) == [], (at, extreme)
    assert implementation == "pallas" or with_nan == (name in NAN_AT_INFINITY)


def _implementations_of_none(name, dtype):
    """Return the implementations that None selects on any platform."""
    selected = set()

    def by_platform(op, arrays, options):
        default = op.default(*arrays, **options) if callable(op.default) else op.default
        selected.update(map(op._available, dataclasses.astuple(default)))
        return op._bind("xla", options)(*arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "_by_platform", by_platform)
        jax.eval_shape(op_of(name, None, None), *ENTRIES[name].small.structs(dtype=dtype))
    return selected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ENTRIES)
def test_no_default_adds_long_sums_less_exactly_than_the_formula(name, dtype):
    if "autodiff" not in _implementations_of_none(name, dtype):
        return
    place, case = next(iter(ENTRIES[name].real.items()))
    one, two = (sum(math.prod(a.shape) for a in case.structs(batch, dtype)) for batch in (1, 2))
    batch = 2**20 // (two - one)
    # Positive terms do not cancel.
    positive = lambda a: jnp.abs(a) if is_float(a) else a  # noqa: E731
    arrays, cotangents = jax.tree.map(positive, drawn(name, place, dtype=dtype, batch=batch))

    def errors(implementation):
        found = run(implementation)(arrays, cotangents)
        return [relative_error(a, e) for a, e in zip(jax.tree.leaves(found), exact, strict=True)]

    def run(implementation):
        if not name.endswith("_backward"):
            return compiled(name, place, implementation)
        return jax.jit(lambda arrays, _: op_of(name, place, implementation)(*arrays))

    exact = jax.tree.leaves(in_float64(run("autodiff"), arrays, cotangents))
    for error, allowed in zip(errors("autodiff"), errors("xla"), strict=True):
        assert error <= 1.2 * allowed + 0.05 * jnp.finfo(dtype).eps


FLOAT32_LOSS = "linear_softmax_cross_entropy"


def _half_precisions():
    for (i, name), (j, implementation) in itertools.product(enumerate(PAIRS), enumerate(("pallas", "xla"))):
        yield name, ("bfloat16", "float16")[(i + j) % 2], implementation


@pytest.mark.parametrize(("name", "dtype", "implementation"), list(_half_precisions()))
def test_half_precisions_match_float64_and_stay(name, dtype, implementation):
    arrays = drawn(name, dtype=dtype)
    with promoting_nothing(broadcasts=name in BROADCASTING):
        y, gradients = compiled(name, None, implementation)(*arrays)
    assert all(a.dtype == ("float32" if name == FLOAT32_LOSS else dtype) for a in y)
    assert all(a.dtype == dtype for a in gradients)
    # Rounding subnormal numbers exceeds the dtype's tolerance.
    for actual, wanted in zip(*map(jax.tree.leaves, ((y, gradients), reference(name, dtype=dtype))), strict=True):
        rounded = np.asarray(wanted).astype(jnp.dtype(dtype))
        assert_close(actual, wanted, TOLERANCE[dtype] + relative_error(rounded, wanted))


def _for_the_interpreter():
    """Yield one implementation per pair: "pallas" where a CPU interprets the kernels quickly, else "xla"."""
    for name in PAIRS:
        place = min(ENTRIES[name].real, key=functools.partial(_size, name))
        yield name, place, "pallas" if _size(name, place) < 2**16 else "xla"


def _size(name, place, batch=2):
    return sum(a.size for a in jax.tree.leaves(case_of(name, place).structs(batch=batch)))


@pytest.mark.parametrize(("name", "place", "implementation"), list(_for_the_interpreter()))
def test_value_and_gradients_of_one_example_at_real_shapes_match_float64(name, place, implementation):
    _check_at_place(name, place, implementation, "float32", batch=1)


@every_implementation
@every_op
def test_an_empty_batch_has_gradients_of_every_shape_and_promotes_nothing(name, implementation):
    place = _smallest_place(name)
    *_, half = ENTRIES[name].kernel_dtypes
    op, arrays = op_of(name, place, implementation), case_of(name, place).structs(0, jnp.dtype(half))
    with promoting_nothing(broadcasts=name in BROADCASTING):
        _, gradients = jax.eval_shape(value_and_gradients(op), arrays, results_of(op, arrays))
    assert [gradient.shape for gradient in gradients] == [a.shape for a in floats(arrays)]


def _on_a_gpu():
    """Yield each place with one example and with many in float32, and with many in one of the half precisions."""
    for i, (name, place) in enumerate(PLACES):
        for dtype, batch in (("float32", 1), ("float32", 1000), (("bfloat16", "float16")[i % 2], 129)):
            yield name, place, dtype, batch


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "place", "dtype", "batch"), list(_on_a_gpu()))
def test_gpu_kernels_at_real_shapes_match_float64_and_give_the_same_bits_twice(name, place, dtype, batch):
    batch = _that_fits(name, place, batch)
    poison_memory()
    once = _check_at_place(name, place, "pallas", dtype, batch)
    run, arrays = compiled(name, place, "pallas"), drawn(name, place, dtype, batch)
    if name.startswith("conv"):
        # The gradients of a gradient are XLA's convolutions, which may use atomics without these options.
        run = jax.jit(run, compiler_options=COMPILER_OPTIONS)
        once = run(*arrays)
    poison_memory()
    assert not _differences(once, run(*arrays))


def _that_fits(name, place, batch):
    """Limit the batch, because for "cifar-m2" a float64 reference of 17 examples takes 7 GB."""
    return min(batch, 17 if place == "cifar-m2" else (case_of(name, place).batch or batch) + 1)


def _rms_errors(name, place, implementation, dtype, batch, draws=16):
    errors = []
    for seed in range(draws):
        actual = compiled(name, place, implementation)(*drawn(name, place, dtype, batch, seed))
        exact = reference(name, place, dtype, batch, seed)
        errors.append([relative_error(a, e) for a, e in zip(*map(jax.tree.leaves, (actual, exact)), strict=True)])
    return np.sqrt(np.mean(np.square(errors), axis=0))


def _differences(one, other):
    """Return for each result or gradient whose bits differ its path, and the relative error of `one`."""
    leaves = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
    return [(jax.tree_util.keystr(path), relative_error(a, b)) for (path, a), b in leaves if not bool((a == b).all())]


def _check_at_place(name, place, implementation, dtype, batch):
    """Compare the results and gradients with float64, and return them."""
    arrays, exact = drawn(name, place, dtype, batch), reference(name, place, dtype, batch)
    actual = compiled(name, place, implementation)(*arrays)
    if name.startswith("mlp") and dtype != "float32":
        # Rounding changes the sign of a few in a thousand inputs of ReLU, where gradients jump. The error of a bias of
        # ten numbers may then differ twofold by chance.
        found, native = (_rms_errors(name, place, i, dtype, batch) for i in (implementation, "autodiff"))
        assert (found <= np.maximum(TOLERANCE[dtype], 1.2 * native)).all()
    elif place and name.startswith("logic_conv2d_or_pool2d") and "backward" not in name:
        # Float64 may select another of nearly equal maxima. The reference uses these indices.
        ((logits, wires, x), (dy, *_)), options = arrays, case_of(name, place).options
        _, places = jaxbp.logic_conv2d_or_pool2d_with_indices(
            logits, wires, x, **options, implementation=implementation
        )
        backward = functools.partial(jaxbp.logic_conv2d_or_pool2d_backward, **options, implementation="autodiff")
        assert_close(actual[0], exact[0], dtype)
        assert_close(actual[1], in_float64(backward, dy, places, logits, wires, x), dtype)
    else:
        assert_close(actual, exact, dtype)
    return actual


def _places_and_dtypes():
    """Yield one place and one dtype per pair. The tests of each kernel lower it at other sizes and dtypes."""
    for i, entry in enumerate(ENTRIES[name] for name in PAIRS):
        yield entry.name, next(iter(entry.real)), entry.kernel_dtypes[i % len(entry.kernel_dtypes)]


@pytest.mark.parametrize(("name", "place", "dtype"), list(_places_and_dtypes()))
def test_pallas_launches_the_recorded_kernels_on_cuda_and_promotes_no_dtype(name, place, dtype):
    assert_launches_as_recorded(name, place, dtype)


EXACT = ("conv2d", "conv2d_relu_max_pool2d", "layer_norm_linear", "linear", "linear_softmax_cross_entropy")
"""Pairs with other kernels for float32 at a precision that excludes TF32."""


@pytest.mark.parametrize("name", EXACT)
def test_exact_kernels_lower_for_cuda(name):
    place = next(iter(ENTRIES[name].real))
    with jax.default_matmul_precision("highest"):
        assert "mosaic_gpu" in _cuda_program(name, place, batch=case_of(name, place).batch or 16384)


def _cuda_program(name, place, batch=2):
    op, arrays = op_of(name, place, "pallas"), case_of(name, place).structs(batch=batch)
    return cuda_program(value_and_gradients(op), arrays, results_of(op, arrays))


@pytest.mark.parametrize("name", [entry.name for entry in DISTINCT if entry.kernel_dtypes])
def test_programs_with_kernels_add_in_a_fixed_order_also_for_second_derivatives(name):
    op, arrays = op_of(name, None, "pallas"), case_of(name).structs(dtype=ENTRIES[name].kernel_dtypes[-1])
    program = launching_program(value_and_gradients(op), arrays, results_of(op, arrays))
    # A GPU's scatter adds in a varying order.
    assert not re.search(r"stablehlo\.scatter.*unique_indices = false", program)


RECORDED = [(name, dtype) for name, of_dtypes in launches.recorded().items() for dtype in of_dtypes]


def test_launches_are_recorded_for_every_case():
    wanted = {entry.name: {dtype: [*entry.real] for dtype in launches.dtypes(entry)} for entry in CATALOGUE}
    found = {name: {d: [*places] for d, places in of.items()} for name, of in launches.recorded().items()}
    assert found == wanted, "run `python docs/launches.py` with the names that differ"


@pytest.mark.parametrize(("name", "dtype"), RECORDED)
def test_pallas_launches_a_kernel_in_every_case_or_raises(name, dtype):
    found = launches.recorded()[name][dtype]
    assert [place for place, kernels in found.items() if not kernels] == []


@pytest.mark.parametrize("name", [entry.name for entry in DISTINCT if entry.name in PAIRS and entry.kernel_dtypes])
def test_float32_kernels_lower_for_cuda_under_x64(name):
    with jax.enable_x64(True), jax.default_matmul_precision("default" if name.startswith("mlp_") else "highest"):
        assert "mosaic_gpu" in _cuda_program(name, None)


@every_pair
def test_kernels_stay_in_bounds_and_write_every_output_in_the_simulator(name):
    if name in ("conv2d_relu_max_pool2d", "gate_layer", "lut_layer", "wire_layer") and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    with on_the_cpu(), simulated():
        result = jax.block_until_ready(compiled(name, None, "pallas")(*drawn(name)))
    assert_close(result, reference(name), "float32")


@every_pair
def test_kernels_give_the_same_bits_whichever_program_runs_first(name):
    run = compiled(name, None, "pallas")
    with on_the_cpu():
        in_order = run(*drawn(name))
        with last_program_first():
            last_first = run(*drawn(name))
    assert not _differences(last_first, in_order)


@every_op
def test_float64_kernels_are_refused(name):
    refused = pytest.raises(NotImplementedError, match=f"^{name}: .*does not take dtype float64, only")
    with jax.enable_x64(True), refused:
        op_of(name, None, "pallas")(*drawn(name, dtype="float64")[0])


@every_op
def test_none_falls_back_for_float64(name):
    with jax.enable_x64(True):
        results = results_of(op_of(name, None, None), drawn(name, dtype="float64")[0])
        assert all(y.dtype == jnp.float64 for y in results)


@every_op
def test_unknown_implementation_is_refused(name):
    wanted = f"^{name}: implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff', or None"
    with pytest.raises(ValueError, match=wanted):
        op_of(name, None, "cuda")(*drawn(name)[0])


@every_formula_and_two_kernels
def test_without_jit_the_gradients_are_the_same(name, implementation):
    if (name, implementation) == ("automaton_step", "xla"):
        return  # nearly all operations are also operations of gate_layer
    arrays, cotangents = drawn(name)
    _, vjp = jax.vjp(of_floats(op_of(name, None, implementation), arrays), *floats(arrays))
    assert_close(vjp(cotangents), compiled(name, None, implementation)(arrays, cotangents)[1], "float32")


@every_formula_and_two_kernels
def test_checkpoint_within_vmap_within_scan_gives_the_gradients_of_each(name, implementation):
    run = compiled(name, None, implementation)
    remade = value_and_gradients(jax.checkpoint(op_of(name, None, implementation)))
    each = [[drawn(name, seed=2 * i + j) for j in range(2)] for i in range(2)]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    expected = stack([stack([run(*one) for one in row]) for row in each])
    scan = jax.jit(lambda stacked: jax.lax.scan(lambda _, row: (None, jax.vmap(remade)(*row)), None, stacked)[1])
    assert_close(scan(stack([stack(row) for row in each])), expected, "float32")


@every_pair
def test_vmap_maps_what_the_op_does_not_get(name):
    (arrays, cotangents), run, op = drawn(name), compiled(name, None, "xla"), op_of(name, None, "xla")

    def scaled(s):
        # The op gets no mapped array, but its backward does.
        return [s * y for y in floats(op(*arrays))], run(arrays, [s * c for c in cotangents])

    scan = jax.vmap(lambda t: jax.lax.scan(lambda _, s: (None, scaled(s)), None, t)[1], axis_name="i")
    found, expected = jax.eval_shape(scan, jnp.ones((3, 2))), jax.eval_shape(scaled, 1.0)
    assert jax.tree.map(lambda a: a.shape[2:], found) == jax.tree.map(lambda a: a.shape, expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices to shard over")
@every_formula_and_two_kernels
def test_shard_map_over_the_batch_gives_the_gradients_of_the_whole(name, implementation):
    place = _smallest_place(name)
    op, (arrays, cotangents) = op_of(name, place, implementation), drawn(name, place, batch=4)
    of_shards = lambda has_batch: P("shard") if has_batch else P()  # noqa: E731
    of_arrays = jax.tree.map(lambda argument: of_shards(BATCH in argument.shape), case_of(name, place).arguments)
    halves = drawn(name, place, batch=2)[1]
    of_results = [of_shards(c.shape != d.shape) for c, d in zip(cotangents, halves, strict=True)]

    def loss(arrays, cotangents):
        # A linear loss is the sum over devices even if a result is a sum over the batch.
        y = floats(op(*arrays))
        return jax.lax.psum(sum(jnp.sum(a * c) for a, c in zip(y, cotangents, strict=True)), "shard")

    sharded_loss = jax.shard_map(
        loss,
        mesh=Mesh(jax.devices()[:2], ("shard",)),
        in_specs=(of_arrays, of_results),
        out_specs=P(),
        # Pallas' interpreter does not support shard_map's types of varying values.
        check_vma=implementation != "pallas" or jax.default_backend() == "gpu",
    )
    function = of_floats(lambda *arrays: sharded_loss(arrays, cotangents), arrays)
    gradients = jax.jit(jax.grad(lambda values: function(*values)[0]))(floats(arrays))
    assert_close(gradients, reference(name, place, batch=4)[1], "float32")


READS_OF_OTHERS = {"gate_layer", "logic_conv2d_or_pool2d", "automaton_step"}
LOOPS = {"embedding", "grouped_linear", "dot_product_attention"}


def _on_a_mesh():
    """Yield each pair with its kernels, which know the axes that devices divide. XLA divides formulas: they occur if
    they read other gates or cells, for convolutions, whose interpreted kernels are slow, and once for the other ops."""
    for name in PAIRS:
        if "conv2d" not in name:
            yield name, "pallas"
        if "conv2d" in name or name in READS_OF_OTHERS | LOOPS or name == "layer_norm":
            yield name, "xla"


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize(("name", "implementation"), list(_on_a_mesh()))
def test_on_a_mesh_the_gradients_are_those_of_one_device(name, implementation, axes):
    # An op computes on explicit axes as on automatic axes.
    if axes == AxisType.Auto and (implementation, name) not in (("pallas", "layer_norm"), ("pallas", "gate_layer")):
        return
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(axes,))
    place = _smallest_place(name)
    op, (arrays, cotangents) = op_of(name, place, implementation), drawn(name, place, batch=16)
    smaller = drawn(name, place, batch=8)
    placed = [_sharded(arrays, smaller[0], mesh), _sharded(cotangents, smaller[1], mesh)]
    assert any(not a.sharding.is_fully_replicated for a in jax.tree.leaves(placed))
    with jax.set_mesh(mesh):
        traced = value_and_gradients(op).trace(*placed)
        jaxpr = str(traced.jaxpr)
        assert "launch[" not in jaxpr or "custom_partitioning[" in jaxpr
        program = traced.lower().compile()
        results = program(*placed)
    # Float64 may select another of nearly equal maxima.
    assert_close(results, compiled(name, place, "xla")(arrays, cotangents), "float32")
    # XLA gathers the examples for a formula that reads other gates.
    assert "all-gather" not in program.as_text() or (implementation, name) == ("xla", "gate_layer")
    assert not [line for line, depth, _ in executed(program.as_text()) if depth and COLLECTIVE.search(line)]


def _sharded(arrays, smaller, mesh):
    def place(a, b):
        axis = next((i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n), None)
        return jax.device_put(a, NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "examples")))

    return jax.tree.map(place, list(arrays), list(smaller))


def _smallest_place(name):
    if any(BATCH in argument.shape for argument in case_of(name).leaves):
        return None
    return min(ENTRIES[name].real, key=functools.partial(_size, name))


@pytest.mark.parametrize("name", ["gate_layer", "gate_layer_backward", "conv2d_relu_max_pool2d", "layer_norm"])
def test_every_platform_at_once_can_be_exported_to(name):
    _export(name)


def test_the_elementwise_ops_can_be_exported_to_every_platform_at_once():
    _export("relu", "softmax", "max", "batch_norm", "dropout")


@pytest.mark.parametrize("name", ["dot_product_attention", "grouped_linear", "layer_norm"])
def test_kernels_can_be_exported_to_several_platforms_at_once(name, on_hopper):
    run, arguments = value_and_gradients(op_of(name, None, "pallas")), drawn(name, dtype="bfloat16")
    with on_the_cpu():
        exported = jax.export.export(run, platforms=("cpu", "cuda"))(*arguments)
        assert "mosaic_gpu" in exported.mlir_module()
        assert_close(exported.call(*arguments), run(*arguments), "bfloat16")


def _export(*names):
    """An export for one platform may contain calls that other versions of XLA refuse."""

    def run(arrays):
        return {name: op_of(name, None, "xla")(*arrays[name]) for name in names}

    arrays = {name: drawn(name)[0] for name in names}
    with on_the_cpu():
        exported = jax.export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(arrays)
        assert_close(floats(exported.call(arrays)), floats(run(arrays)), "float32")

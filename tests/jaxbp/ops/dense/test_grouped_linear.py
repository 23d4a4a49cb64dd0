import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, in_float64, kernel_results, normal, on_the_cpu, relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp
from jaxbp import grouped_linear, grouped_linear_backward
from jaxbp.ops.dense.grouped_linear import GroupSizes

ROWS, GROUPS, IN, OUT = 40, 3, 5, 4
X, W, BIAS, DY = normal((ROWS, IN), (GROUPS, IN, OUT), (GROUPS, OUT), (ROWS, OUT))
SIZES = [[13, 20, 7], [0, 40, 0], [17, 0, 9], [1, 1, 1], [0, 0, 0], [30, 0, 30]]
"""Borders within a tile, all rows in one group, rows without a group, and more rows than there are."""

implementations = pytest.mark.parametrize("implementation", ["xla", "autodiff"])


def by_definition(x, w, bias, sizes):
    """Multiply all rows by the weights of all groups, and select."""
    end = jnp.cumsum(sizes)[:, None]
    row = jnp.arange(x.shape[0])
    selected = (row >= end - sizes[:, None]) & (row < end)
    return jnp.einsum("gr,gro->ro", selected.astype(x.dtype), jnp.einsum("ri,gio->gro", x, w) + bias[:, None])


def all_results(op):
    def of_sizes(x, w, bias, dy, sizes):
        y, vjp = jax.vjp(lambda *arrays: op(*arrays, sizes), x, w, bias)
        return y, *vjp(dy)

    return jax.jit(lambda *arrays: jax.lax.map(lambda sizes: of_sizes(*arrays[:-1], sizes), arrays[-1]))


def results(implementation):
    op = lambda x, w, bias, sizes: grouped_linear(x, w, sizes, bias, implementation=implementation)  # noqa: E731
    return all_results(op)


@implementations
def test_values_and_gradients_match_the_definition_in_float64_for_groups_of_any_size(implementation):
    found = results(implementation)(X, W, BIAS, DY, np.array(SIZES))
    expected = in_float64(all_results(by_definition), X, W, BIAS, DY, np.array(SIZES))
    for at, sizes in enumerate(SIZES):
        # Some results are all 0.
        of_sizes = (jax.tree.map(lambda a, at=at: np.asarray(a[at]) + 1, tree) for tree in (found, expected))
        assert_close(*of_sizes, "float32", sizes)


def test_nan_in_a_group_or_in_a_row_without_one_does_not_reach_other_groups():
    sizes, nan = np.array([13, 9, 4]), np.nan
    # The second group and the rows without a group are NaN.
    x, w, bias, dy = X.at[13:22].set(nan).at[26:].set(nan), W.at[1].set(nan), BIAS, DY.at[13:22].set(nan)
    found = results("xla")(x, w, bias, dy.at[26:].set(nan), sizes[None])
    expected = results("xla")(X, W, BIAS, DY, sizes[None])
    rows, groups = np.r_[:13, 22:ROWS], np.array([0, 2])
    for a, e in zip(found, expected, strict=True):
        of_others = rows if a.shape[1] == ROWS else groups
        np.testing.assert_array_equal(a[0, of_others], e[0, of_others])
        assert np.isnan(np.delete(a[0], of_others, axis=0)).all()


@implementations
def test_without_a_bias_the_other_gradients_are_the_same(implementation):
    sizes = np.array([17, 0, 9])
    backward = functools.partial(grouped_linear_backward, DY, X, W, sizes, implementation=implementation)
    dx, dw, dbias = backward()
    _, vjp = jax.vjp(lambda x, w: grouped_linear(x, w, sizes, implementation=implementation), X, W)
    jax.tree.map(np.testing.assert_array_equal, vjp(DY), (dx, dw))
    assert_close(dbias[2], DY[17:26].sum(0), "float32")


def test_the_result_may_have_another_dtype():
    sizes, half = np.array([17, 0, 9]), [a.astype(jnp.bfloat16) for a in (X, W, BIAS)]

    def run(implementation, *arrays):
        op = functools.partial(jaxbp.grouped_linear, preferred_element_type=jnp.float32, implementation=implementation)
        y, vjp = jax.vjp(lambda x, w, bias: op(x, w, sizes, bias), *arrays)
        return y, *vjp(DY)

    y, *gradients = run("xla", *half)
    exact = run("xla", *(a.astype(jnp.float32) for a in half))
    assert y.dtype == jnp.float32 and all(g.dtype == jnp.bfloat16 for g in gradients)
    # y and dy are not rounded to bfloat16.
    np.testing.assert_allclose(y, exact[0], rtol=1e-6, atol=1e-6)
    for gradient, e in zip(gradients, exact[1:], strict=True):
        np.testing.assert_array_equal(gradient, e.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="does not take preferred_element_type float32 of arrays in bfloat16"):
        run("pallas", *half)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (None, None, None, 0, 0), (0, None, None, None, None)], ids=str)
def test_any_arguments_may_be_mapped(axes):
    arrays = X, W, BIAS, DY, np.array([13, 20, 7])
    stacked = [a if axis is None else jnp.stack([a, a[::-1]]) for a, axis in zip(arrays, axes, strict=True)]

    def run(x, w, bias, dy, sizes):
        return [a[0] for a in results("xla")(x, w, bias, dy, sizes[None])]

    found = jax.jit(jax.vmap(run, axes))(*stacked)
    each = [[a if axis is None else a[i] for a, axis in zip(stacked, axes, strict=True)] for i in range(2)]
    assert_close(found, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(run(*one) for one in each)), "float32")


def test_only_dy_may_be_mapped_in_half_precision():
    x, w, dy = (a.astype(jnp.bfloat16) for a in (X, W, DY))
    backward = functools.partial(grouped_linear_backward, implementation="xla")
    mapped = jax.jit(jax.vmap(backward, (0, None, None, None)))(jnp.stack([dy, -dy]), x, w, np.array([13, 20, 7]))
    for gradients, of_one in zip(mapped, backward(dy, x, w, np.array([13, 20, 7])), strict=True):
        np.testing.assert_array_equal(gradients[0], of_one)
        np.testing.assert_array_equal(gradients[1], -of_one)


def test_the_number_of_rows_may_be_symbolic():
    sizes = np.array([13, 9, 4])

    def gradients(x, w):
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(grouped_linear(x, w, sizes))), (0, 1))(x, w)

    (rows,) = jax.export.symbolic_shape("rows")
    with on_the_cpu():
        exported = jax.export.export(jax.jit(gradients))(jax.ShapeDtypeStruct((rows, IN), X.dtype), W)
        assert_close(exported.call(X, W), gradients(X, W), "float32")


def test_the_memory_of_the_formula_is_linear_in_its_arguments_also_for_second_derivatives():
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 128), (64, 128, 128)))
    loss = lambda x, w: jnp.sum(jnp.sin(grouped_linear(x, w, np.full(64, 64), implementation="xla")))  # noqa: E731
    gradient = jax.grad(loss, (0, 1))
    second = jax.grad(lambda *arrays: sum(jnp.sum(jnp.sin(g)) for g in gradient(*arrays)), (0, 1))
    for function, most in ((gradient, 4), (second, 10)):
        memory = jax.jit(function).lower(x, w).compile().memory_analysis()
        assert memory.temp_size_in_bytes < most * 4 * (x.size + w.size)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize(
    ("implementation", "axes"), [("xla", AxisType.Explicit), ("pallas", AxisType.Auto)], ids=["explicit", "automatic"]
)
def test_on_a_mesh_each_device_has_the_weights_of_its_groups(implementation, axes):
    dtype, sizes = "float16" if implementation == "pallas" else "float32", jnp.array([5, 0, 3, 7, 9, 1, 0, 10])
    x, w, bias, dy = (a.astype(dtype) for a in normal((ROWS, IN), (8, IN, OUT), (8, OUT), (ROWS, OUT)))
    mesh = jax.make_mesh((8,), ("experts",), axis_types=(axes,))
    specs = P(), P("experts"), P("experts"), P(), P()
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, bias, dy, sizes), specs, strict=True)
    ]

    @jax.jit
    def run(x, w, bias, dy, sizes):
        y, vjp = jax.vjp(lambda x, w, b: grouped_linear(x, w, sizes, b, implementation=implementation), x, w, bias)
        return y, *vjp(dy)

    expected = run(x, w, bias, dy, sizes)
    with jax.set_mesh(mesh):
        program = run.lower(*placed).compile()
        found = program(*placed)
    assert_close(found, expected, dtype)
    assert [a.sharding.spec[0] if a.ndim and len(a.sharding.spec) else None for a in found[2:]] == ["experts"] * 2
    gathered = [line for line in program.as_text().splitlines() if "all-gather(" in line]
    assert all(line.split(" = ")[1].startswith("s32") for line in gathered), "only group sizes are gathered"


def structs(dtype):
    shapes = (ROWS, 64), (GROUPS, 64, 128), (GROUPS, 128), (ROWS, 128)
    return *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), jax.ShapeDtypeStruct((GROUPS,), "int32")


def with_kernels(x, w, bias, dy, sizes):
    y, vjp = jax.vjp(lambda x, w, b: grouped_linear(x, w, sizes, b, implementation="pallas"), x, w, bias)
    return y, *vjp(dy)


def test_kernels_compute_the_result_and_each_gradient_that_is_used(on_hopper):
    arrays = structs("bfloat16")
    assert kernel_results(with_kernels, *arrays) == [1] * 4
    assert kernel_results(lambda *arrays: with_kernels(*arrays)[:2], *arrays) == [1] * 2
    assert kernel_results(lambda *arrays: with_kernels(*arrays)[0], *arrays) == [1]


def test_a_batch_of_kernels_lowers_for_cuda(on_hopper):
    stacked = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in structs("bfloat16")]
    assert "mosaic_gpu" in cuda_program(jax.vmap(with_kernels), *stacked)


def test_kernels_take_half_precision(on_hopper):
    with pytest.raises(NotImplementedError, match="does not take dtype float32, only bfloat16 and float16"):
        jax.eval_shape(with_kernels, *structs("float32"))


@pytest.mark.parametrize("zipf", [False, True])
def test_the_sizes_of_the_catalogue_sum_to_the_batch(zipf):
    for groups, rows in ((8, 16384), (128, 65536), (4, 3), (4, 0)):
        sizes = GroupSizes(groups, zipf).draw(None, rows, "float32")
        assert sizes.shape == (groups,) and sizes.sum() == rows and sizes.min() >= 0
        assert rows < groups or (sizes[0] > 2 * sizes[-1]) == zipf


INVALID = {
    "sizes": (
        TypeError,
        lambda: grouped_linear(X, W, np.ones(GROUPS)),
        "grouped_linear: group_sizes has dtype float32; wants integers, say group_sizes.astype(jnp.int32)",
    ),
    "too many sizes": (
        ValueError,
        lambda: grouped_linear(X, W, np.ones(4, int)),
        "grouped_linear: group_sizes has shape (4,); wants (3,)",
    ),
    "features": (
        ValueError,
        lambda: grouped_linear(X[:, 1:], W, np.ones(3, int)),
        "grouped_linear: x has shape (40, 4); wants (rows, 5)",
    ),
    "no groups": (
        ValueError,
        lambda: grouped_linear(X, W[:0], np.ones(0, int)),
        "grouped_linear: w has shape (0, 5, 4); wants (groups, in_features, out_features) with groups of at least 1",
    ),
    "bias": (
        ValueError,
        lambda: grouped_linear(X, W, np.ones(3, int), BIAS[0]),
        "grouped_linear: bias has shape (4,); wants (3, 4)",
    ),
    "dy": (
        ValueError,
        lambda: grouped_linear_backward(DY[1:], X, W, np.ones(3, int)),
        "grouped_linear_backward: dy has shape (39, 4); wants (40, 4)",
    ),
    "dtype": (
        ValueError,
        lambda: grouped_linear(X, W, np.ones(3, int), preferred_element_type=jnp.int32),
        "grouped_linear: preferred_element_type is int32; wants a floating dtype of at least 16 bits, or None",
    ),
    "unknown dtype": (
        ValueError,
        lambda: grouped_linear(X, W, np.ones(3, int), preferred_element_type="single precision"),
        "grouped_linear: preferred_element_type is 'single precision'; wants a floating dtype, or None",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_bad_input_is_refused(name):
    error, call, message = INVALID[name]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_kernels_match_float64_and_repeat_their_bits(dtype):
    sizes = jnp.array([500, 0, 7, 300, 3])
    arrays = [a.astype(dtype) for a in normal((1001, 136), (5, 136, 200), (5, 200), (1001, 200))]
    run = jax.jit(with_kernels)
    first, second = (run(*arrays, sizes) for _ in range(2))
    exact = in_float64(all_results(by_definition), *arrays, np.asarray(sizes)[None])
    for a, b, e in zip(first, second, exact, strict=True):
        np.testing.assert_array_equal(a, b)
        assert relative_error(a, e[0]) < 5e-3

import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import cuda_program
from jax import lax
from planted import FIRST, run

from pallas_kernels.core import launch as launch_module
from pallas_kernels.core.layouts import LANES, zeros_like

pytestmark = pytest.mark.usefixtures("in_an_interpreter")

ROWS = jax.ShapeDtypeStruct((2, LANES), jnp.float32)
SHORT = jax.ShapeDtypeStruct((2, 96), jnp.float32)
LONG = jax.ShapeDtypeStruct((2, 4 * LANES), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((LANES, LANES), jnp.float32)
INDICES = jax.ShapeDtypeStruct((LANES,), jnp.int32)


def carry(x_ref, y_ref, *, i):
    y_ref[i] = lax.fori_loop(0, 2, lambda k, total: total + x_ref[k], jnp.zeros(LANES))  # fails


def carry_of_while(x_ref, y_ref, *, i):
    start = jnp.int32(0), jnp.zeros(LANES)
    y_ref[i] = lax.while_loop(lambda a: a[0] < 2, lambda a: (a[0] + 1, a[1] + x_ref[a[0]]), start)[1]  # fails


def branches(x_ref, y_ref, *, i):
    y_ref[i] = lax.cond(i > 0, lambda: x_ref[i], lambda: jnp.zeros(LANES))  # fails


def length(x_ref, y_ref, *, i):
    y_ref[i, :] = 2 * x_ref[i]  # fails


def product(x_ref, y_ref, *, i):
    row = x_ref[i]
    y_ref[i] = row * (row @ row)  # fails


def product_of_matrices(x_ref, y_ref, *, i):
    y_ref[...] = jnp.dot(x_ref[...], x_ref[...])  # fails


def loaded_index(x_ref, index_ref, y_ref, *, i):
    y_ref[i] = x_ref[index_ref[FIRST], i]  # fails


def loaded_rows(x_ref, index_ref, y_ref, *, i):
    y_ref[...] = x_ref[index_ref[FIRST]]  # fails


def taken(x_ref, index_ref, y_ref, *, i):
    y_ref[i] = jnp.take(x_ref[i], index_ref[FIRST])  # fails


def mixed_dtypes(x_ref, scale_ref, y_ref, *, i):
    y_ref[i] = x_ref[i] * scale_ref[i]  # fails


def one_axis(x_ref, y_ref, *, i):
    y_ref[i] = jnp.sum(x_ref[...], axis=0)  # fails


def iota(x_ref, y_ref, *, i):
    y_ref[i] = x_ref[i] * jnp.arange(LANES)  # fails


def slice_of_registers(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = x_ref[i][:LANES]  # fails


def other_primitive(x_ref, y_ref, *, i):
    y_ref[i] = jnp.cumsum(x_ref[i])  # fails


BODIES = [
    (carry, (ROWS,), "FragmentedArray", "Begin with `zeros_like(vector)`"),
    (carry_of_while, (ROWS,), "unexpected layout", "Begin with `zeros_like(vector)`"),
    (branches, (ROWS,), "", "Use `jnp.where`"),
    (length, (SHORT,), "must have a number of elements", "has 96 elements; wants a multiple of 128"),
    (product, (ROWS,), "dot_general", "wants multiplications and sums"),
    (product_of_matrices, (SQUARE,), "dot_general", "wants multiplications and sums"),
    (loaded_index, (SQUARE, INDICES), "", "wants scalars and slices"),
    (loaded_rows, (SQUARE, INDICES), "int_indexer_shape non-empty", "`x_ref[index_ref[row]]`"),
    (taken, (ROWS, INDICES), "Unsupported layout", "wants scalars and slices"),
    (mixed_dtypes, (LONG, LONG.update(dtype=jnp.bfloat16)), "Incompatible FragmentedArray", "`vector_length(*arrays)`"),
    (one_axis, (ROWS,), "No support for axes", "as in `jnp.sum(x_ref[row])`"),
    (iota, (ROWS,), "iota", "Pass the numbers to `launch` as an array"),
    (slice_of_registers, (LONG,), "sliced", "a slice of the reference"),
    (other_primitive, (ROWS,), "cumsum", "the body uses `cumsum`"),
]


def error_of(body, *arrays, **options):
    with pytest.raises(NotImplementedError) as caught:
        cuda_program(lambda *a: run(body, *a, **{"shape": arrays[0].shape} | options), *arrays)
    return caught.value


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__


def failing_line(function):
    lines, first = inspect.getsourcelines(function)
    return next((first + n, line.strip()) for n, line in enumerate(lines) if line.endswith("# fails\n"))


@pytest.mark.parametrize(("body", "arrays", "raw", "advice"), BODIES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_names_the_kernel_the_line_and_the_way_out(body, arrays, raw, advice):
    error = error_of(body, *arrays)
    number, code = failing_line(body)
    assert str(error).startswith(f"planted: {__file__}:{number}: `{code}`: ")
    assert "; wants " in str(error) and advice in str(error)
    first, *others = causes(error)
    assert "FragmentedArray" not in str(first) and any(raw in str(cause) for cause in others)


def test_a_body_that_begins_with_zeros_like_is_lowered():
    def body(x_ref, y_ref, *, i):
        y_ref[i] = lax.fori_loop(0, 2, lambda k, total: total + x_ref[k], zeros_like(x_ref[i]))

    assert "mosaic_gpu" in cuda_program(lambda x: run(body, x), ROWS)


def squared_norm(row):
    return row @ row  # fails


def test_the_line_may_be_in_a_function_that_the_body_calls():
    def body(x_ref, y_ref, *, i):
        y_ref[i] = x_ref[i] * squared_norm(x_ref[i])

    assert str(error_of(body, ROWS)).startswith(f"planted: {__file__}:{failing_line(squared_norm)[0]}: ")


def test_the_line_is_the_call_even_if_jax_has_traced_the_function_before():
    @jax.jit
    def running_sum(x):
        return jnp.cumsum(x)

    running_sum(jnp.ones(LANES))

    def body(x_ref, y_ref, *, i):
        y_ref[i] = running_sum(x_ref[i])  # fails

    assert str(error_of(body, ROWS)).startswith(f"planted: {__file__}:{failing_line(body)[0]}: ")


def test_the_line_is_known_if_kernels_are_compiled_ahead(monkeypatch):
    monkeypatch.setattr(launch_module, "compiles_ahead", lambda context: True)
    assert str(error_of(product, ROWS)).startswith(f"planted: {__file__}:{failing_line(product)[0]}: ")


def test_the_line_is_known_under_vmap_and_within_other_programs():
    x = jax.ShapeDtypeStruct((3, *ROWS.shape), jnp.float32)
    with pytest.raises(NotImplementedError, match=f"planted: {__file__}:{failing_line(product)[0]}: "):
        cuda_program(lambda x: jnp.sum(jax.vmap(lambda x: run(product, x))(x)), x)


def test_errors_of_the_body_itself_are_unchanged():
    def body(x_ref, y_ref, *, i):
        raise ValueError("multiple of 128 (got 3)")

    with pytest.raises(ValueError, match=r"^multiple of 128 \(got 3\)$"):
        cuda_program(lambda x: run(body, x), ROWS)

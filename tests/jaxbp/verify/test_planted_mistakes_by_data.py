"""Mistakes that only some data, integers, or transformations show, each in a `custom_vjp` or in a `Pair`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

from jaxbp import Pair
from jaxbp.verify import check
from jaxbp.verify.arguments import take_apart
from jaxbp.verify.points import other_integers


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def with_rule(forward, backward, value=None):
    """Return `forward` as a `custom_vjp` that returns the result of `value` when it is differentiated."""
    op = jax.custom_vjp(lambda *args: forward(*args))

    def of_saved(args, dy):
        found = with_none(backward)(dy, *args)
        return found if isinstance(found, tuple) else (found,)

    op.defvjp(lambda *args: ((value or forward)(*args), args), of_saved)
    op.__name__ = "op"
    return op


def with_none(backward):
    """Return `backward`, with None for arguments whose gradients it does not return."""

    def of_all(dy, *args):
        found = backward(dy, *args)
        found = found if isinstance(found, tuple) else (found,)
        found += (None,) * (len(args) - len(found))
        return found if len(found) > 1 else found[0]

    return of_all


def as_pair(forward, backward, value=None):
    saving = {} if value is None else {"save": lambda *args: (value(*args), args)}
    return Pair(forward, {"xla": with_none(backward)}, name="op", **saving)


def sin_if(wrong):
    """Return a backward of sin that is zero where `wrong(dy, x)`."""
    return lambda dy, x: jnp.where(wrong(dy, x), 0, dy) * jnp.cos(x)


def product_wrong_if(wrong):
    """Return a product that is 0 if `vmap` meets `wrong(size, maps dy, maps x)`."""

    @custom_vmap
    def product(dy, x):
        return dy * x

    @product.def_vmap
    def _(size, batched, dy, x):
        dy, x = (a if on else jnp.broadcast_to(a, (size, *a.shape)) for a, on in zip((dy, x), batched, strict=True))
        return (0 if wrong(size, *batched) else 1) * product(dy, x), True

    return product


def sin_batched_wrongly(wrong):
    product = product_wrong_if(wrong)
    return lambda dy, x: product(dy, jnp.cos(x))


@custom_vmap
def product_wrong_if_nested(dy, x):
    return dy * x


@product_wrong_if_nested.def_vmap
def _(size, batched, dy, x):
    axes = [0 if on else None for on in batched]
    return jax.vmap(product_wrong_if(lambda *_: True), axes)(dy, x), True


def is_nested(dy, x):
    return sum(type(a).__name__ == "BatchTracer" and type(a.val).__name__ == "BatchTracer" for a in (dy, x)) > 0


def is_within(file):
    return any(frame.filename.endswith(file) for frame in inspect.stack(0))


def take(x, rows):
    return x[rows]


def by_one_hot(dy, x, rows):
    return jax.nn.one_hot(rows, len(x), dtype=dy.dtype).T @ dy


def overwritten(dy, x, rows):
    return jnp.zeros_like(x).at[rows].set(dy)


def added_twice_if_equal(dy, x, rows):
    return jnp.zeros_like(x).at[rows].add(dy * (rows[:, None] == rows).sum(1, keepdims=True))


def cross_entropy(x, labels):
    loss = jax.nn.logsumexp(x, axis=-1) - jnp.take_along_axis(x, labels[:, None] % x.shape[-1], axis=-1)[:, 0]
    return jnp.where(labels == -1, 0, loss)


def cross_entropy_of_ignored(dy, x, labels):
    return dy[:, None] * (jax.nn.softmax(x) - jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype))


def masked_sum(x, mask):
    return jnp.where(mask, x, 0).sum(-1)


def first_of_row_only(dy, x, mask):
    return jnp.where(mask[:1], dy[:, None], 0)


def masked_mean(x, mask):
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)


def max_of(x):
    return x.max(-1)


def max_given_to_all(dy, x):
    return dy[:, None] * (x == x.max(-1, keepdims=True))


def softmax_from_0(x):
    p = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), 0))
    return p / p.sum(-1, keepdims=True)


def softmax_backward(softmax):
    def backward(dy, x):
        p = softmax(x)
        return p * (dy - (p * dy).sum(-1, keepdims=True))

    return backward


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def attention_backward(dy, q, k, v):
    p, dp = softmax_from_0(q @ k.T), dy @ v.T
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ dy


def layer_norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def layer_norm_without_eps(dy, x, scale):
    dx, _ = jax.vjp(layer_norm, x, scale)[1](dy)
    return dx, (dy * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-12)).sum(0)


X, WEIGHTS = drawn((3, 4), (4,))
ROWS, LABELS, MASK = np.array([2, 0]), np.array([0, 2, -1]), np.array([[True, False, True, True]] * 3)
SIN = jnp.sin
# name -> (forward, backward, arguments, the added data that shows it)
MISTAKES = {
    "ties get everything": (max_of, max_given_to_all, [X], ["ties"]),
    "ties of maximum get everything": (jnp.maximum, lambda dy, x, y: (jnp.where(x >= y, dy, 0), jnp.where(y >= x, dy, 0)), drawn((3, 4), (3, 4)), ["ties"]),
    "a slope at 0 outside of both slopes": (jax.nn.relu, lambda dy, x: jnp.where(x == 0, 2, jnp.where(x > 0, 1, 0)) * dy, [X], ["kinks"]),
    "vmap of dy alone": (SIN, sin_batched_wrongly(lambda size, dy, x: dy and not x), [X], []),
    "vmap of x alone": (SIN, sin_batched_wrongly(lambda size, dy, x: x and not dy), [X], []),
    "vmap of three": (SIN, sin_batched_wrongly(lambda size, dy, x: size == 3), [X], []),
    "nested vmap": (SIN, sin_if(is_nested), [X], []),
    "nested custom_vmap": (SIN, lambda dy, x: product_wrong_if_nested(dy, jnp.cos(x)), [X], []),
    "vmap of an argument, not of the other": (jnp.multiply, lambda dy, x, w: (product_wrong_if(lambda size, dy, w: dy and not w)(dy, w), dy * x), drawn((3, 4), (3, 4)), []),
    "vmap of the other argument": (jnp.multiply, lambda dy, x, w: (product_wrong_if(lambda size, w, dy: w and not dy)(w, dy), dy * x), drawn((3, 4), (3, 4)), []),
    "vmap of all arguments, not of dy": (jnp.multiply, lambda dy, x, w: (product_wrong_if(lambda size, x, w: x and w)(0 * x + 1, w) * dy, dy * x), drawn((3, 4), (3, 4)), []),
    "in scan": (SIN, sin_if(lambda dy, x: is_within("control_flow/loops.py")), [X], []),
    "in cond": (SIN, sin_if(lambda dy, x: is_within("control_flow/conditionals.py")), [X], []),
    "in shard_map": (SIN, sin_if(lambda dy, x: is_within("shard_map.py")), [X], []),
    "repeated rows overwritten": (take, overwritten, [X, ROWS], ["integers"]),
    "repeated rows counted twice": (take, added_twice_if_equal, [X, ROWS], ["integers"]),
    "negative rows": (take, by_one_hot, [X, np.array([0, -1, 1])], ["integers"]),
    "rows above 2": (take, lambda dy, x, rows: jnp.zeros_like(x).at[jnp.minimum(rows, 2)].add(dy), [drawn((9, 2))[0], np.array([0, 8, 1])], ["integers"]),
    "ignored labels": (cross_entropy, cross_entropy_of_ignored, [X, LABELS], ["integers"]),
    "the mask of the first row": (masked_sum, first_of_row_only, [X, MASK], ["integers"]),
    "the mask is ignored": (masked_sum, lambda dy, x, mask: jnp.broadcast_to(dy[:, None], x.shape), [X, np.ones((3, 4), bool)], ["integers"]),
    "a mean over all elements": (masked_mean, lambda dy, x, mask: dy * mask / mask.size, [X, np.ones((3, 4), bool)], ["integers"]),
    "a mean over no elements": (masked_mean, lambda dy, x, mask: jnp.where(mask.any(), dy * mask / mask.sum(), 1), [X, MASK], ["integers"]),
    "a running maximum from 0": (jax.nn.softmax, softmax_backward(softmax_from_0), [X], ["large"]),
    "a running maximum from 0 in attention": (attention, attention_backward, drawn((3, 4), (5, 4), (5, 2)), ["large"]),
    "x above 300": (SIN, sin_if(lambda dy, x: jnp.abs(x) > 320), [X], ["large"]),
    "x above 3,000": (SIN, sin_if(lambda dy, x: jnp.abs(x) > 3_000), [X], ["large"]),
    "dy above 1,000": (SIN, lambda dy, x: jnp.clip(dy, -1_000, 1_000) * jnp.cos(x), [X], ["cotangents"]),
    "dy below 1e-6": (SIN, sin_if(lambda dy, x: jnp.abs(dy) < 1e-6), [X], ["cotangents"]),
    "eps is missing": (layer_norm, layer_norm_without_eps, [X, WEIGHTS], ["small"]),
    "x below 1e-3": (SIN, sin_if(lambda dy, x: jnp.abs(x) < 1e-3), [X + 1], ["small"]),
}  # fmt: skip
# ruff: noqa: E501


FORMS = [(with_rule, as_pair)[i % 2] for i in range(len(MISTAKES))]


@pytest.mark.parametrize(("mistake", "op_of"), zip(MISTAKES, FORMS, strict=True))
def test_a_planted_mistake_is_caught(mistake, op_of):
    forward, backward, args, added = MISTAKES[mistake]
    settings = dict(implementations=["xla"]) if op_of is as_pair else {}
    result = check(op_of(forward, backward), *args, order=1, added=added, **settings)
    assert not result
    assert all(row.index is not None for row in result.failures), result.failures[0]


# name -> (forward, value when differentiated, backward, arguments)
WRONG_VALUES = {
    "twice the value": (SIN, lambda x: 2 * jnp.sin(x), lambda dy, x: dy * jnp.cos(x), [X]),
    "a running maximum from 0": (jax.nn.softmax, softmax_from_0, softmax_backward(jax.nn.softmax), [X]),
}


@pytest.mark.parametrize("mistake", WRONG_VALUES)
@pytest.mark.parametrize("op_of", [with_rule, as_pair])
def test_a_wrong_value_while_differentiating_is_caught(op_of, mistake):
    forward, value, backward, args = WRONG_VALUES[mistake]
    settings = dict(implementations=["xla"]) if op_of is as_pair else {}
    failures = check(op_of(forward, backward, value), *args, order=1, added=["large"], **settings).failures
    assert failures and {row.order for row in failures} == {0}


def test_integers_outside_the_range_of_the_data_are_not_tried_and_said_so():
    """Negative rows, say. Whether an op takes them is not known."""
    result = check(with_rule(take, by_one_hot), X, ROWS, order=1, added=["integers"])
    assert result and "integers outside the range of yours" in " ".join(str(result).split())


def test_other_integers_have_the_properties_of_the_data():
    ends, order, labels, mask = np.array([1, 2, 4, 9]), np.array([3, 1, 0, 2]), np.array([4, -1, 0, 2]), MASK
    arrays = [(a, True) for a in (ends, order, labels, mask)] + [(labels, False)]
    found = dict(other_integers(arrays, np.random.default_rng(0)))
    assert set(found) == {"other integers", "repeated integers", "other masks", "masks of True", "masks of False"}
    for ends, order, labels, mask, alone in found.values():
        assert (np.diff(ends) >= 0).all() and 1 <= ends.min() <= ends.max() <= 9
        assert sorted(order) == [0, 1, 2, 3]
        assert set(labels) <= {-1, 0, 1, 2, 3, 4} and alone is arrays[-1][0]
        assert mask.dtype == bool and mask.shape == MASK.shape


def test_other_integers_may_be_above_the_range_of_int64():
    hashes = np.array([2**63, 2**63 + 2, 2**63 + 4], np.uint64)
    for (changed,) in dict(other_integers([(hashes, True)], np.random.default_rng(0))).values():
        assert changed.dtype == np.uint64 and hashes.min() <= changed.min() <= changed.max() <= hashes.max()


def test_integers_within_other_nodes_than_lists_and_dictionaries_stay():
    """Only the class knows which numbers fit together."""
    (_, alone), (_, not_alone) = take_apart(jnp.take, (X, {"rows": [ROWS]}, Rows(ROWS))).integers
    assert alone and not not_alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    rows: jax.Array


def safe_sinc(x):
    return jnp.where(x != 0, jnp.sin(x) / x, 1)


def test_a_gradient_that_is_nan_where_the_slope_is_0_fails():
    x = np.float32([0.5, 0.0, -2.0])
    (failure,) = check(safe_sinc, x, order=1, added=()).failures
    assert failure.index == (1,) and np.isnan(failure.analytic) and failure.numeric == 0


def test_a_gradient_that_is_nan_at_a_kink_fails():
    result = check(jnp.linalg.norm, np.zeros(3, np.float32), order=1, added=())
    assert [row.reason for row in result.failures] == ["not finite; at a kink with slopes from -0.845 to 0.82"]


def test_a_row_without_compared_elements_is_not_ok():
    result = check(lambda x: jnp.log(x).sum(), np.float32([np.nan, 1.0]), order=1, added=())
    empty = check(lambda x, w: x @ w, *drawn((0, 3), (3, 2)), order=1, added=())
    for row in (*result.rows, *empty.rows):
        assert row.elements > 0 or row.verdict != "ok"
    assert empty

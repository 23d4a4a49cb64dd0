"""Embedding. A token is one element of the indices."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, Argument, Case, case_of, pair_entries, row_cases
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast, wide
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE
from jaxbp.pairing import DefaultImplementation, Implementation, Pair, differentiable, in_dtypes_of
from jaxbp.pairing.mesh import batched, on_explicit_axes
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.core.layouts import LANES
from pallas_kernels.dense import embedding as kernels

_TERMS_PER_SUM = 64
"""Average number of terms per partial sum of a scatter. Not tuned."""


def _forward(indices, table, *, num_embeddings):
    sharding = None
    if on_explicit_axes((indices, table)):
        of_indices, of_table = jax.typeof(indices).sharding, jax.typeof(table).sharding
        sharding = NamedSharding(of_table.mesh, PartitionSpec(*of_indices.spec, of_table.spec[1]))
    return table.at[indices].get(mode="fill", fill_value=jnp.nan, out_sharding=sharding)


def _tokens(dy, indices, num_embeddings):
    rows = indices.reshape(-1)
    rows = jnp.where(rows < 0, rows + num_embeddings, rows)
    rows = jnp.where((rows >= 0) & (rows < num_embeddings), rows, num_embeddings)
    return dy.reshape(*rows.shape, dy.shape[-1]), rows.astype(jnp.int32)


def _sorted(rows):
    return lax.sort_key_val(rows, jnp.arange(rows.shape[0], dtype=jnp.int32))


def _add_runs(values, rows):
    """Return the cumulative sums of `values` along axis 0, restarted wherever the integer in `rows` changes."""
    token = jnp.arange(rows.shape[0])

    def is_same_run(distance):
        return (token >= distance) & (rows[jnp.maximum(token - distance, 0)] == rows)

    def double(state):
        distance, sums = state
        before = sums[jnp.maximum(token - distance, 0)]
        return 2 * distance, sums + jnp.where(is_same_run(distance)[:, None], before, 0.0)

    return lax.while_loop(lambda state: jnp.any(is_same_run(state[0])), double, (jnp.int32(1), values))[1]


def _sums_of_runs(dy, indices, *, num_embeddings):
    dy, rows = _tokens(dy, indices, num_embeddings)
    rows, order = _sorted(rows)
    sums = _add_runs(upcast(dy)[order], rows)
    is_last = jnp.append(rows, -1)[1:] != rows
    # Only the last sum of a run is complete. `set` drops the others, with rows out of range.
    dtable = jnp.zeros((num_embeddings, dy.shape[-1]), sums.dtype)
    dtable = dtable.at[jnp.where(is_last, rows, num_embeddings)].set(sums, mode="drop")
    return None, dtable.astype(dy.dtype)


def _scatter(dy, indices, *, num_embeddings):
    # JAX can transpose a scatter, unlike a `while_loop`.
    dy, rows = _tokens(dy, indices, num_embeddings)
    tokens = rows.shape[0]
    # Many terms that are added one after another to one sum would lose digits, also in float32.
    symbolic = is_symbolic_dim(tokens) or is_symbolic_dim(num_embeddings)
    parts = 1 if symbolic else max(1, tokens // (_TERMS_PER_SUM * num_embeddings))
    sums = jnp.zeros((parts, num_embeddings, dy.shape[-1]), wide(dy.dtype))
    sums = sums.at[jnp.arange(tokens) % parts, rows].add(upcast(dy), mode="drop")
    return None, jnp.sum(sums, axis=0).astype(dy.dtype)


def _formula(dy, indices, **options):
    runs, scatter = (functools.partial(formula, **options) for formula in (_sums_of_runs, _scatter))
    if _is_half(dy):
        # On a CPU, a scatter in float32 is faster, and rounding to half precision hides its errors. On a GPU, a
        # scatter would add in a varying order.
        return on_gpu(runs, scatter, dy, indices)
    return runs(dy, indices)


def _is_half(a):
    return wide(a.dtype) != a.dtype


def _kernel(dy, indices, *, num_embeddings):
    if dy.size == 0:
        return _scatter(dy, indices, num_embeddings=num_embeddings)
    dy, rows = _tokens(dy, indices, num_embeddings)
    rows, order = _sorted(rows)
    # The iterations of a loop would be separate launches on a GPU.
    first = jnp.searchsorted(rows, jnp.arange(num_embeddings + 1, dtype=jnp.int32), method="scan_unrolled")
    starts = first.astype(jnp.int32)
    padded = jnp.pad(dy, ((0, 0), (0, -dy.shape[1] % LANES)))
    return None, kernels.table_gradient(padded, order, starts)[:, : dy.shape[1]]


def _unsupported(indices, table, *, num_embeddings):
    if reason := checks.unsupported(indices, table):
        return reason
    return "2^31 or more elements" if indices.size * table.shape[1] >= 2**31 else None


KERNEL_EMBEDDINGS = 4096
"""In float32 on GPUs, the kernel is the default from this number of embeddings on, with at most four tokens per
embedding (docs/lab/2026-11-26-embedding.md)."""


def _default(indices, table, *, num_embeddings):
    if _is_half(table):  # autodiff adds in half precision
        return DefaultImplementation()
    if num_embeddings >= KERNEL_EMBEDDINGS and math.prod(indices.shape) <= 4 * num_embeddings:
        return DefaultImplementation(gpu="pallas", older_gpu="autodiff", elsewhere="autodiff")
    return AUTODIFF_EVERYWHERE


_FORMULA = differentiable(_formula, _scatter, batched("dy", "indices"))
_EMBEDDING = Pair(
    _forward,
    {"xla": _FORMULA, "pallas": _kernel},
    residuals=lambda indices, table, *, num_embeddings: (indices,),
    name="embedding",
    unsupported=_unsupported,
    batch_axes=batched("dy", "indices"),
    default=_default,
    jit=True,
)


def embedding(
    indices: Int[AnyArray, "*batch"],
    table: Float[AnyArray, "num_embeddings features"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch features"]:
    """Embedding, `y = table[indices]`, in the table's dtype.

    As in `jax.numpy.take`, a negative index counts from the end, and an index outside
    `[-num_embeddings, num_embeddings)` gives a row of NaN and no gradient.

    Source: Y. Bengio et al., "A neural probabilistic language model", JMLR 2003.
    """
    indices, table = _check("embedding", indices, table)
    return _EMBEDDING(indices, table, num_embeddings=table.shape[0], implementation=implementation)


def embedding_backward(
    dy: Float[AnyArray, "*batch features"],
    indices: Int[AnyArray, "*batch"],
    table: Float[AnyArray, "num_embeddings features"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "num_embeddings features"]:
    """Gradient of `embedding`: `dtable_k = Σ_i dy_i`, with the sum over every i for which index i selects row k.

    Only the table's shape and dtype are used. Sums are in float32 or wider, in a fixed order, except that
    `implementation="autodiff"` sums in dy's dtype, and on a GPU in a varying order.
    """
    op = "embedding_backward"
    indices, given = _check(op, indices, table)
    dy, table = checks.floating(op, dy=dy, table=given)
    checks.shape(op, "dy", dy, *indices.shape, table.shape[1])
    dtable = _EMBEDDING.vjp(dy, indices, table, num_embeddings=table.shape[0], implementation=implementation)
    return in_dtypes_of(given, dtable)


def _check(op, indices, table):
    indices = checks.integers(op, "indices", indices)
    if indices.dtype.itemsize < 4:  # the number of rows may not fit
        indices = indices.astype(jnp.int32)
    (table,) = checks.numeric(op, table=table)
    checks.shape(op, "table", table, "num_embeddings", "features")
    return indices, table


def _token_case(num_embeddings: int, features: int) -> Case:
    indices = Argument((BATCH,), below=num_embeddings)
    return case_of((BATCH, features), indices, (num_embeddings, features))


ENTRIES = pair_entries(
    embedding,
    case_of((2, 3, 4), Argument((2, 3), below=5), (5, 4)),
    {"characters": _token_case(65, 384), **row_cases((32768, 128256, 2560), of=_token_case)},
)

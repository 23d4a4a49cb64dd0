"""A training step of a language model as a workload."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bench.peers.flax_gpt import FlaxGPT
from experiments.bench.training_workloads import loss_and_gradients, training, with_scale
from experiments.bench.workloads import Workload
from jaxbp.nn import GPT, GPT_SIZES
from jaxbp.training.optimizers import fused_adamw

GPT_WORKLOADS = {
    "124M": (1024, dict(batches=((32,), ()), steps=5, error_batch=1)),
    "1.3B": (2048, dict(batches=((16,), ()), steps=2, error_batch=None)),
    "tiny": (32, dict(batches=((), (2,)), steps=3, error_batch=2)),
}
"""The number of tokens per row, and fields of the `Workload`. The float64 reference of the 1.3B model needs too much
memory."""
SIZES = GPT_SIZES | {
    "tiny": dict(vocab_size=256, num_layers=2, features=64, num_heads=4, num_key_value_heads=2)
    | dict(hidden_features=128, normalization="rms_norm", gate="silu", use_bias=False),
}
ADAMW = dict(lr=3e-4, weight_decay=0.1)
FLAX = "autodiff, Flax and cuDNN"


def causal_share(sizes: Mapping[str, Any], length: int) -> float:
    """Return the share of the operations of all matrix products that is left without the masked pairs of attention."""
    model = nnx.eval_shape(lambda: GPT(**sizes | {"num_layers": 1}, rngs=nnx.Rngs(0)))
    parameters, layers = nnx.to_flat_state(nnx.state(model, nnx.Param)), sizes["num_layers"]
    matrices = [(path, a.size) for path, a in parameters if a.ndim == 2 and "position_embed" not in path]
    weights = sum(size * (layers if "blocks" in path else 1) for path, size in matrices)
    scores = layers * sizes["features"] * length
    # Per token, each weight and each pair of a query and a key need three products: one in the forward, two in the
    # backward. A pair needs two: with the key and with the value.
    return (weights + scores * (length + 1) / length) / (weights + 2 * scores)


def gpt_workload(place: str, **other_sizes: Any) -> Workload:
    """Return a training step by AdamW of the model `SIZES[place] | other_sizes`. An example is one row of tokens."""
    length, fields = GPT_WORKLOADS[place]
    sizes = SIZES[place] | other_sizes

    @functools.cache
    def graph(implementation, dtype):
        options = dict(dtype=jnp.dtype(dtype))
        kind = implementation
        if not callable(implementation):
            kind, options = GPT, options | dict(implementation=implementation)
        return nnx.split(nnx.eval_shape(lambda: kind(**sizes, **options, rngs=nnx.Rngs(0))), nnx.Param)

    def function(implementation, dtype):
        graph_of_model, _ = graph(implementation, dtype)
        return loss_and_gradients(lambda parameters, *data: nnx.merge(graph_of_model, parameters).loss(*data))

    def draw(seed, batch, dtype):
        parameter_key, text_key = jax.random.split(jax.random.key(seed))
        parameters = nnx.state(GPT(**sizes, rngs=nnx.Rngs(parameter_key)), nnx.Param)
        text = jax.random.randint(text_key, (batch, length + 1), 0, sizes["vocab_size"])
        return with_scale(parameters, dtype), text[:, :-1], text[:, 1:]

    adamw = functools.partial(fused_adamw, ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
    return Workload(
        "gpt",
        place,
        f"gpt training step {place}",
        sizes,
        function=function,
        draw=draw,
        chain=functools.partial(training, optimizer=adamw),
        baselines={FLAX: FlaxGPT},
        tokens=length,
        share=causal_share(sizes, length),
        **fields,
    )

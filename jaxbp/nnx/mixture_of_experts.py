from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array
from jax.lax import PrecisionLike
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.ops.dense.grouped_linear import grouped_linear
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.pointwise.activations import softmax
from jaxbp.ops.pointwise.gated_linear_unit import Activation, gated_linear_unit
from jaxbp.ops.pointwise.reductions import logsumexp
from jaxbp.pairing import IMPLEMENTATIONS, Implementation, Pair


def _select(x, order, inverse, *, copies):
    return x[order // copies]


def _select_gradient(dy, order, inverse, *, copies):
    """Return dx: for each row of x, the sum of the rows of dy for its `copies` copies. The permutation `inverse`
    gathers them, so that no gradient is scattered."""
    rows = upcast(dy[inverse]).reshape(-1, copies, *dy.shape[1:])
    return jnp.sum(rows, axis=1).astype(dy.dtype), None, None


_SELECT = Pair(
    _select,
    {"xla": _select_gradient},
    save=lambda x, order, inverse, *, copies: (_select(x, order, inverse, copies=copies), (order, inverse)),
    name="select_rows",
)
"""Rows of x, each `copies` times, in the order of the permutation `order`, whose inverse is `inverse`."""


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      experts: `(tokens, experts_per_token)`, the indices of the experts, the most probable first.
      weights: `(tokens, experts_per_token)`, the weights of their results, in float32 or wider.
      load_balancing_loss: `E Σ_e s_e P_e` for E experts, where s_e is the share of expert e among the selected experts
        of all tokens, and P_e is its mean probability. The loss is 1 if s and P are uniform. s_e has no gradient.
      z_loss: the mean over the tokens of `logsumexp(logits)²`.

    Both losses of an empty batch are 0.

    Sources: W. Fedus et al., "Switch transformers", JMLR 2022; B. Zoph et al., "ST-MoE", 2022 (z-loss).
    """

    experts: Int[Array, "tokens experts_per_token"]
    weights: Float[Array, "tokens experts_per_token"]
    load_balancing_loss: Float[Array, ""]
    z_loss: Float[Array, ""]


_LECUN_NORMAL, _STACKED_LECUN_NORMAL = initializers.lecun_normal(), initializers.lecun_normal(batch_axis=0)


class MixtureOfExperts(nnx.Module):
    """A mixture of experts. Each token goes to the most probable of several gated units, its experts:

        p = softmax(x router + router_bias),    y = Σ_e weight_e expert_e(x)    over the experts with the largest p,
        expert_e(x) = (activation(x gate_e) * (x up_e)) down_e.

    The weights are the probabilities p, divided by their sum over the token's experts if `normalize`. Tokens are never
    dropped. The router computes in float32 or wider. `jaxbp.grouped_linear` computes the experts.

    The parameters are `router (in_features, experts)`, `gate_up (experts, in_features, 2 hidden_features)`, and `down
    (experts, hidden_features, in_features)`. In `gate_up`, the columns of gate_e come before the columns of up_e. With
    `use_bias`, there are also `gate_up_bias (experts, 2 hidden_features)` and `down_bias (experts, in_features)`.

    Args:
      experts: the number of experts.
      experts_per_token: the number of experts of each token.
      activation: as in `jaxbp.gated_linear_unit`.
      normalize: whether the weights of a token sum to 1.
      use_bias, use_router_bias: whether the experts and the router have a bias.
      jitter: the router multiplies its inputs by random numbers in [1 - jitter, 1 + jitter), unless `deterministic`.
      deterministic: as in `flax.nnx.Dropout`; `train()` and `eval()` of a module change it.
      dtype: the dtype of the experts' computation, or None for the promoted dtype of inputs and parameters.
      param_dtype: the dtype of the parameters.
      kernel_init: initializer of gate_up and down, whose first axis is the experts.
      router_init: initializer of the router.
      precision, implementation: as in `jaxbp.grouped_linear`.
      rngs: keys for the parameters (`params`) and the jitter (`jitter`).

    Raises:
      ValueError: a size is not a positive int, `experts_per_token` exceeds `experts`, or an option is unknown.

    Source: N. Shazeer et al., "Outrageously large neural networks", ICLR 2017; A. Jiang et al., "Mixtral of experts",
    2024 (weights).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        experts: int,
        experts_per_token: int,
        *,
        activation: Activation = "silu",
        normalize: bool = True,
        use_bias: bool = False,
        use_router_bias: bool = False,
        jitter: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: initializers.Initializer = _STACKED_LECUN_NORMAL,
        router_init: initializers.Initializer = _LECUN_NORMAL,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        name = type(self).__name__
        sizes = dict(in_features=in_features, hidden_features=hidden_features, experts=experts)
        for argument, value in (sizes | dict(experts_per_token=experts_per_token)).items():
            checks.count(name, argument, value)
        if experts_per_token > experts:
            raise ValueError(f"{name}: experts_per_token is {experts_per_token}; wants at most {experts}, all experts")
        if implementation not in (*IMPLEMENTATIONS, None):
            wanted = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{name}: implementation is {implementation!r}; wants {wanted}, or None")
        self.jitter = checks.number(name, "jitter", jitter, 0.0, 1.0)
        self.experts, self.experts_per_token = experts, experts_per_token
        self.activation, self.normalize, self.deterministic = activation, normalize, deterministic
        self.dtype, self.precision, self.implementation = dtype, precision, implementation

        def parameter(initializer, *shape):
            return nnx.Param(initializer(rngs.params(), shape, param_dtype))

        zeros = initializers.zeros
        self.router = parameter(router_init, in_features, experts)
        self.gate_up = parameter(kernel_init, experts, in_features, 2 * hidden_features)
        self.down = parameter(kernel_init, experts, hidden_features, in_features)
        self.router_bias = nnx.data(parameter(zeros, experts) if use_router_bias else None)
        self.gate_up_bias = nnx.data(parameter(zeros, experts, 2 * hidden_features) if use_bias else None)
        self.down_bias = nnx.data(parameter(zeros, experts, in_features) if use_bias else None)
        self.rngs = nnx.data(rngs.jitter.fork() if jitter > 0 else None)

    def __call__(
        self, inputs: Float[AnyArray, "*batch in_features"], *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "*batch in_features"], Routing]:
        """Return (y, routing). Multiply each loss in `routing` by a coefficient, and add it to the loss of the model.

        Args:
          rngs: keys for the jitter, instead of the keys of the constructor.
        """
        inputs = checks.array(type(self).__name__, "inputs", inputs)
        names = "gate_up", "down", "gate_up_bias", "down_bias"
        parameters = [None if (p := getattr(self, name)) is None else p[...] for name in names]
        x, gate_up, down, gate_up_bias, down_bias = dtypes.promote_dtype((inputs, *parameters), dtype=self.dtype)
        x = self._tokens(x)
        routing = self.route(inputs, rngs=rngs)
        selected = routing.experts.reshape(-1)
        order = jnp.argsort(selected, stable=True).astype(jnp.int32)
        inverse = jnp.argsort(order).astype(jnp.int32)
        sizes = jnp.sum(selected[:, None] == jnp.arange(self.experts), axis=0, dtype=jnp.int32)
        by_formula = dict(implementation="autodiff" if self.implementation == "autodiff" else "xla")
        options = dict(precision=self.precision, implementation=self.implementation)
        rows = _SELECT(x, order, inverse, copies=self.experts_per_token, **by_formula)
        gate, up = jnp.split(grouped_linear(rows, gate_up, sizes, gate_up_bias, **options), 2, axis=-1)
        hidden = gated_linear_unit(gate, up, self.activation, implementation=self.implementation)
        rows = grouped_linear(hidden, down, sizes, down_bias, **options)
        rows = _SELECT(rows, inverse, order, copies=1, **by_formula).reshape(*routing.weights.shape, *x.shape[1:])
        y = jnp.sum(routing.weights[..., None] * rows.astype(routing.weights.dtype), axis=1)
        return y.astype(rows.dtype).reshape(inputs.shape), routing

    def route(self, inputs: Float[AnyArray, "*batch in_features"], *, rngs: nnx.Rngs | None = None) -> Routing:
        """Return the experts of each token, their weights, and the losses. Token t is row t of
        `inputs.reshape(-1, in_features)`."""
        options = dict(implementation=self.implementation)
        bias = self.router_bias
        x, router = upcast(self._tokens(jnp.asarray(inputs))), upcast(self.router[...])
        if self.jitter > 0 and not self.deterministic:
            key = (self.rngs if rngs is None else rngs.jitter)()
            x = x * jax.random.uniform(key, x.shape, x.dtype, 1 - self.jitter, 1 + self.jitter)
        logits = linear(x, router.T, None if bias is None else upcast(bias[...]), precision=self.precision, **options)
        probabilities = softmax(logits, **options)
        _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits), self.experts_per_token)
        is_selected = experts[..., None] == jnp.arange(self.experts)
        # The gradient of a gather would be a scatter.
        weights = jnp.sum(jnp.where(is_selected, probabilities[:, None], 0.0), axis=-1)
        if self.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        tokens = max(x.shape[0], 1)  # the losses of no tokens are 0, not NaN
        shares = jnp.sum(is_selected, axis=(0, 1), dtype=probabilities.dtype) / (tokens * self.experts_per_token)
        balance = self.experts * jnp.sum(shares * jnp.sum(probabilities, axis=0) / tokens)
        return Routing(experts, weights, balance, jnp.sum(logsumexp(logits, axis=-1, **options) ** 2) / tokens)

    def _tokens(self, inputs):
        features = self.router.shape[0]
        if inputs.ndim == 0 or inputs.shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__}: inputs has shape {inputs.shape}; wants (..., {features}), the in_features"
            )
        return inputs.reshape(-1, features)

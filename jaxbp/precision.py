"""Mixed precision: which dtype is used where, and dynamic loss scaling.

The numbers of float16 end at 65504 and lose digits below 2^-14, zero comes at 2^-25; gradients of a loss are often
smaller. So the loss is multiplied by a scale before it is differentiated, and its gradients are divided by it, in
float32. If a gradient is not finite, the step is skipped and the scale made smaller; after many finite steps it grows.

    policy = jaxbp.precision.Policy.parse("mixed_float16")
    scale = jaxbp.precision.LossScale.create()

    @jax.jit
    def step(parameters, optimizer_state, scale, x, y):
        def loss(parameters):
            predicted = model(policy.cast_to_compute(parameters), policy.cast_to_compute(x))
            return jnp.mean(jnp.square(policy.cast_to_output(predicted) - y))

        value, gradients, finite, scale = scale.value_and_grad(loss)(parameters)
        updates, new_state = optimizer.update(gradients, optimizer_state, parameters)
        new = optax.apply_updates(parameters, updates), new_state
        return *where_finite(finite, new, (parameters, optimizer_state)), scale, value

Everything is a pure function of arrays: it runs under `jax.jit`, `jax.lax.scan` and `jax.vmap`, with donated buffers,
and asks nothing of the host. Only `LossScale.check` does, which a training loop calls now and then.

Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jaxbp.ops._numerics import widen

if TYPE_CHECKING:
    import optax

Tree = TypeVar("Tree")

NAMES = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
PRESETS = {
    "float32": ("float32", "float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "float16": ("float16", "float16", "float16"),
    "mixed_bfloat16": ("float32", "bfloat16", "float32"),
    "mixed_float16": ("float32", "float16", "float32"),
}
"""Name -> dtypes of parameters, of the computation and of its results."""


# ---------------------------------------------------------------------------------------------------------- the policy


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which floating dtype is used where. Hashable, so that a jitted function may take it as a static argument.

    Attributes:
      param_dtype: of the parameters, and so of their gradients and the optimiser's state.
      compute_dtype: of activations, and of the parameters as layers see them.
      output_dtype: of what the model returns, in which the loss is computed.

    Raises:
      TypeError: a dtype that is not floating.
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"Policy: {field.name} is {value!r}; wants a floating dtype")
            object.__setattr__(self, field.name, dtype)

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """The policy that a text names.

        Args:
          text: "float32", "bfloat16", "float16", "mixed_bfloat16" or "mixed_float16", of which the last two keep the
            parameters and the results in float32; or all three, as "params=float32,compute=bfloat16,output=float32".

        Raises:
          ValueError: another text.
        """
        if text in PRESETS:
            return cls(*PRESETS[text])
        pairs = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
        given = {NAMES.get(name): dtype for name, _, dtype in pairs}
        wanted = f"one of {', '.join(PRESETS)}, or params=...,compute=...,output=... with a dtype each"
        if len(pairs) != 3 or given.keys() != set(NAMES.values()):
            raise ValueError(f"Policy.parse: text is {text!r}; wants {wanted}")
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"Policy.parse: text is {text!r}: {error}") from None

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, field)}" for name, field in NAMES.items())

    def cast_to_param(self, tree: Tree) -> Tree:
        """The tree with its floating arrays in `param_dtype`; all others are kept."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """The tree with its floating arrays in `compute_dtype`; all others are kept."""
        return _cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """The tree with its floating arrays in `output_dtype`; all others are kept."""
        return _cast(tree, self.output_dtype)


def _cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype) if _is_float(a) else a, tree)


def _is_float(a):
    return jnp.issubdtype(jnp.result_type(a), jnp.floating)


# -------------------------------------------------------------------------------------------------------- loss scaling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor of the loss, and how it changes. A pytree; made by `create` or `static`.

    Attributes:
      value: the scale.
      finite_steps: finite steps since it last changed.
      skipped_steps: steps in a row, up to the last one, that were not finite.
      growth, interval: after so many finite steps it is multiplied by `growth`, if the product is finite.
      backoff, minimum: after a step that is not finite it is multiplied by `backoff`, down to `minimum`.
    """

    value: Float[Array, ""]
    finite_steps: Int[Array, ""]
    skipped_steps: Int[Array, ""]
    growth: float = dataclasses.field(metadata=dict(static=True))
    backoff: float = dataclasses.field(metadata=dict(static=True))
    interval: int = dataclasses.field(metadata=dict(static=True))
    minimum: float = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        initial: float = 2.0**15,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
    ) -> "LossScale":
        """A dynamic scale.

        Powers of two change no digits of a gradient that is neither too small nor too large.

        Raises:
          ValueError: numbers that are no scale: not finite, an initial one below the minimum, a growth below 1, a
            backoff above 1, an interval or a minimum that is not above 0.
        """
        op = "LossScale.create"
        _require(op, "minimum", minimum, minimum > 0, "a finite number above 0")
        _require(op, "initial", initial, initial >= minimum, f"a finite number of at least the minimum, {minimum}")
        _require(op, "growth", growth, growth >= 1, "a finite number of at least 1")
        _require(op, "backoff", backoff, 0 < backoff <= 1, "a number above 0 and up to 1")
        _require(op, "interval", interval, interval >= 1 and interval == int(interval), "a whole number above 0")
        # An array each, so that all can be donated.
        finite_steps, skipped_steps = (jnp.zeros((), jnp.int32) for _ in range(2))
        options = dict(growth=float(growth), backoff=float(backoff), interval=int(interval), minimum=float(minimum))
        return cls(jnp.asarray(initial, jnp.float32), finite_steps, skipped_steps, **options)

    @classmethod
    def static(cls, value: float) -> "LossScale":
        """A scale that stays as it is. Steps that are not finite are skipped all the same.

        Raises:
          ValueError: a value that is not finite and above 0.
        """
        _require("LossScale.static", "value", value, value > 0, "a finite number above 0")
        return cls.create(value, growth=1.0, backoff=1.0, minimum=value)

    def scale(self, loss: Float[Array, "..."]) -> Float[Array, "..."]:
        """`loss` times the scale, in float32 or wider."""
        return widen(jnp.asarray(loss)) * self.value

    def unscale(self, gradients: Tree) -> Tree:
        """The gradients over the scale, in float32 or wider; arrays that are not floating are kept."""
        return jax.tree.map(lambda g: widen(g) / self.value if _is_float(g) else g, gradients)

    def update(self, finite: Bool[Array, ""]) -> "LossScale":
        """The scale after a step of which all gradients were finite, or not."""
        due = self.finite_steps + 1 >= self.interval
        larger = self.value * self.growth
        grown = jnp.where(due & jnp.isfinite(larger), larger, self.value)
        smaller = jnp.maximum(self.value * self.backoff, self.minimum)
        return dataclasses.replace(
            self,
            value=jnp.where(finite, grown, smaller),
            finite_steps=jnp.where(finite & ~due, self.finite_steps + 1, 0),
            skipped_steps=jnp.where(finite, 0, self.skipped_steps + 1),
        )

    def value_and_grad(
        self, f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
    ) -> Callable[..., tuple[Any, Any, Bool[Array, ""], "LossScale"]]:
        """`jax.value_and_grad(f, argnums, has_aux)` of the scaled loss.

        Returns:
          A function of f's arguments that returns `(value, gradients, finite, next_scale)`: the loss, or with `has_aux`
          the loss and what else f returns; the gradients divided by the scale, in float32 or wider, and of JAX's dtype
          float0 for arrays that are not floating; whether they and the loss are finite; and the next step's scale.
        """

        def scaled(*args, **kwargs):
            result = f(*args, **kwargs)
            value, aux = result if has_aux else (result, None)
            return self.scale(value), (value, aux)

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True, allow_int=True)

        def value_and_gradients(*args, **kwargs):
            (_, (value, aux)), gradients = differentiated(*args, **kwargs)
            finite = all_finite((value, gradients))
            value = (value, aux) if has_aux else value
            return value, self.unscale(gradients), finite, self.update(finite)

        return value_and_gradients

    def check(self, most_skipped: int = 100) -> None:
        """Raises an error if the last `most_skipped` steps, or more, were all skipped. Waits for the device.

        By then a dynamic scale is at its minimum: what is not finite is no overflow of the scaled gradients, but the
        loss, the data or the parameters.

        Raises:
          FloatingPointError: after so many skipped steps.
        """
        skipped, value = np.max(self.skipped_steps), np.min(self.value)
        if skipped >= most_skipped:
            raise FloatingPointError(
                f"LossScale: the last {skipped} steps were skipped, as the loss or a gradient was not finite at a "
                f"scale of {value:g} either; look for NaN or infinity in the data, the loss and the parameters"
            )


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number of every floating array of a tree is finite."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree) if _is_float(a)], bool))


def where_finite(finite: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """`new` if a step was finite, else `old`: parameters, optimiser state and step counters of a skipped step are kept.

    Args:
      new, old: trees of the same structure, shapes and dtypes.

    Raises:
      ValueError, TypeError: trees of different structures, shapes or dtypes.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        structures = f"{jax.tree.structure(new)} and {jax.tree.structure(old)}"
        raise ValueError(f"where_finite: new and old have the structures {structures}; wants the same")
    for (path, a), b in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(a) != jnp.shape(b) or jnp.result_type(a) != jnp.result_type(b):
            came = f"{jnp.result_type(a)}{list(jnp.shape(a))} and {jnp.result_type(b)}{list(jnp.shape(b))}"
            name = jax.tree_util.keystr(path)
            raise TypeError(f"where_finite: new{name} and old{name} are {came}; wants the same shape and dtype")
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    Attributes:
      loss_scale: by whose `scale` the loss is multiplied before it is differentiated.
      inner: the state of the optimiser.
    """

    loss_scale: LossScale
    inner: Any


def loss_scaled(
    optimizer: "optax.GradientTransformation", loss_scale: LossScale
) -> "optax.GradientTransformationExtraArgs":
    """An Optax transformation that takes the gradients of a scaled loss and gives the updates of `optimizer`.

        optimizer = loss_scaled(optax.adam(1e-3), LossScale.create())
        gradients = jax.grad(lambda p: state.loss_scale.scale(loss(p)))(parameters)
        updates, state = optimizer.update(gradients, state, parameters)

    The gradients are divided by the scale in float32. If one is not finite, the updates are 0 and the optimiser's state
    stays as it was; the scale changes as `LossScale.update` says.
    """
    import optax

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return LossScaledState(loss_scale, optimizer.init(params))

    def update(updates, state, params=None, **extra):
        finite = all_finite(updates)
        new, inner = optimizer.update(state.loss_scale.unscale(updates), state.inner, params, **extra)
        kept = jax.tree.map(jnp.zeros_like, new), state.inner
        new, inner = where_finite(finite, (new, inner), kept)
        return new, LossScaledState(state.loss_scale.update(finite), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _require(op, name, value, is_valid, wanted):
    if not (is_valid and math.isfinite(value)):
        raise ValueError(f"{op}: {name} is {value!r}; wants {wanted}")

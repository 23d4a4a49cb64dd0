"""Mixed precision: a policy of dtypes, and dynamic loss scaling (`docs/mixed_precision.md`).

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

from jaxbp.common.numerics import upcast

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


@dataclasses.dataclass(frozen=True)
class Policy:
    """Floating dtypes of a model. A policy may be a static argument of `jax.jit`.

    Attributes:
      param_dtype: for the parameters, their gradients, and the optimizer's state.
      compute_dtype: for the activations, and the parameters within layers.
      output_dtype: for the model's results and the loss.

    Raises:
      TypeError: a dtype is not floating.
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
        """Return the policy that a text names.

        Args:
          text: "float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16", or three dtypes, such as
            "params=float32,compute=bfloat16,output=float32". Mixed policies keep parameters and results in float32.

        Raises:
          ValueError: the text has another form.
        """
        if text in PRESETS:
            return cls(*PRESETS[text])
        pairs = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
        given = {NAMES.get(name): dtype for name, _, dtype in pairs}
        wanted = f"one of {', '.join(PRESETS)}, or params=...,compute=...,output=... with one dtype each"
        if len(pairs) != 3 or given.keys() != set(NAMES.values()):
            raise ValueError(f"Policy.parse: text is {text!r}; wants {wanted}")
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"Policy.parse: text is {text!r}; wants {wanted} ({error})") from None

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, field)}" for name, field in NAMES.items())

    def cast_to_param(self, tree: Tree) -> Tree:
        """Cast floating arrays to `param_dtype`."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Cast floating arrays to `compute_dtype`."""
        return _cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Cast floating arrays to `output_dtype`."""
        return _cast(tree, self.output_dtype)


def _cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype) if _is_float(a) else a, tree)


def _is_float(a):
    return jnp.issubdtype(jnp.result_type(a), jnp.floating)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The scale of the loss, a pytree made by `create` or `static`.

    A step is finite if its loss and all its gradients are finite. Skip other steps with `where_finite`.

    Attributes:
      finite_steps: the number of finite steps since the scale last changed.
      skipped_steps: the number of skipped steps since the last finite step.
      growth, interval: after `interval` finite steps, the scale is multiplied by `growth`, if the product is finite.
      backoff, minimum: after a skipped step, the scale is multiplied by `backoff`, but stays at least `minimum`.
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
        """Return a dynamic scale. A power of two changes no digits of a gradient, unless the gradient overflows or is
        subnormal.

        Raises:
          ValueError: a number is not finite, or not in its range: `initial >= minimum > 0`, `growth >= 1`,
            `0 < backoff <= 1`, and a whole `interval >= 1`.
        """
        op = "LossScale.create"
        _require(op, "minimum", minimum, minimum > 0, "a finite number above 0")
        _require(op, "initial", initial, initial >= minimum, f"a finite number of at least the minimum, {minimum}")
        _require(op, "growth", growth, growth >= 1, "a finite number of at least 1")
        _require(op, "backoff", backoff, 0 < backoff <= 1, "a number above 0 and up to 1")
        _require(op, "interval", interval, interval >= 1 and interval == int(interval), "a whole number above 0")
        # One buffer cannot be donated twice.
        finite_steps, skipped_steps = (jnp.zeros((), jnp.int32) for _ in range(2))
        options = dict(growth=float(growth), backoff=float(backoff), interval=int(interval), minimum=float(minimum))
        return cls(jnp.asarray(initial, jnp.float32), finite_steps, skipped_steps, **options)

    @classmethod
    def static(cls, value: float) -> "LossScale":
        """Return a constant scale.

        Raises:
          ValueError: the value is not a finite number above 0.
        """
        _require("LossScale.static", "value", value, value > 0, "a finite number above 0")
        return cls.create(value, growth=1.0, backoff=1.0, minimum=value)

    def scale(self, loss: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return `loss` times the scale, in float32 or wider."""
        return upcast(jnp.asarray(loss)) * self.value

    def unscale(self, gradients: Tree) -> Tree:
        """Return the gradients divided by the scale, in float32 or wider. Non-floating arrays do not change."""
        return jax.tree.map(lambda g: upcast(g) / self.value if _is_float(g) else g, gradients)

    def update(self, finite: Bool[Array, ""]) -> "LossScale":
        """Return the scale for the next step, given whether this step was finite."""
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
        """Return `jax.value_and_grad(f, argnums, has_aux)`, computed with the scaled loss.

        Returns:
          A function of f's arguments that returns `(value, gradients, finite, next_scale)`. The value is the loss, or
          with `has_aux` the pair `(loss, aux)`. The gradients are unscaled, in float32 or wider, with JAX's dtype
          float0 for arrays that are not floating. `finite` is whether the gradients and the loss are finite.
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
        """Wait for the device, and check that not all of the last `most_skipped` steps were skipped.

        Raises:
          FloatingPointError: all were skipped, usually because of NaN or infinity in the data or parameters.
        """
        skipped, value = np.max(self.skipped_steps), np.min(self.value)
        if skipped >= most_skipped:
            raise FloatingPointError(
                f"LossScale: the last {skipped} steps were skipped because the loss or a gradient was not finite, even "
                f"at a scale of {value:g}; look for NaN or infinity in the data, the loss and the parameters"
            )


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether all floating arrays of a tree are finite."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree) if _is_float(a)], bool))


def where_finite(finite: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """Return the tree `new` if a step was finite, else `old`.

    Raises:
      ValueError, TypeError: the trees have different structures, shapes, or dtypes.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        structures = f"{jax.tree.structure(new)} and {jax.tree.structure(old)}"
        raise ValueError(f"where_finite: new and old have the structures {structures}; wants the same structure")
    for (path, a), b in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(a) != jnp.shape(b) or jnp.result_type(a) != jnp.result_type(b):
            came = f"{jnp.result_type(a)}{list(jnp.shape(a))} and {jnp.result_type(b)}{list(jnp.shape(b))}"
            name = jax.tree_util.keystr(path)
            raise TypeError(f"where_finite: new{name} and old{name} are {came}; wants the same shape and dtype")
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


class LossScaledState(NamedTuple):
    loss_scale: LossScale
    inner: Any


def loss_scaled(
    optimizer: "optax.GradientTransformation", loss_scale: LossScale
) -> "optax.GradientTransformationExtraArgs":
    """Return an Optax transformation from the gradients of a scaled loss to the updates of `optimizer`::

        optimizer = loss_scaled(optax.adam(1e-3), LossScale.create())
        state = optimizer.init(parameters)
        gradients = jax.grad(lambda p: state.loss_scale.scale(loss(p)))(parameters)
        updates, state = optimizer.update(gradients, state, parameters)

    If a gradient is not finite, the updates are 0 and the state of `optimizer` does not change.
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

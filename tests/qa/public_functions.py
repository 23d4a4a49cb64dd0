"""Public functions with correct autodiff gradients, on which `jaxbp.verify.check` must report no failure."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

X, SQUARE, ROW = (2, 4), (3, 3), (4,)
LABELS = np.array([1, 3])


@dataclasses.dataclass(frozen=True)
class PublicFunction:
    """A function to check. `settings` are keyword arguments of `jaxbp.verify.check`.

    `arguments` has one pair per argument: its shape, and its kind of random data, a key of `KINDS`.
    """

    name: str
    function: Callable
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def draw(self, seed: int, dtype: str = "float32") -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        return [np.asarray(KINDS[kind](random, shape)).astype(dtype) for shape, kind in self.arguments]


def _definite(random, shape):
    a = random.standard_normal(shape)
    return a @ a.T + 2 * np.eye(shape[0])


KINDS = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "positive": lambda random, shape: np.exp(0.5 * random.standard_normal(shape)),
    "unit": lambda random, shape: random.uniform(0.05, 0.95, shape),
    "rows": lambda random, shape: random.dirichlet(np.ones(shape[-1]), shape[:-1]),
    "definite": _definite,
}

UNARY = {
    (jax.nn, "normal"): (
        "relu relu6 elu celu selu gelu silu softplus sigmoid log_sigmoid hard_tanh hard_swish hard_sigmoid hard_silu "
        "leaky_relu soft_sign mish squareplus sparse_plus sparse_sigmoid glu softmax log_softmax logsumexp standardize"
    ),
    (jnp, "normal"): (
        "sin cos tan tanh sinh cosh arctan arcsinh exp exp2 expm1 abs square sinc max min prod mean std var cumsum "
        "cumprod sort median ptp nanmean nansum diff deg2rad"
    ),
    (jnp, "positive"): "log log1p log2 log10 sqrt cbrt reciprocal",
    (jnp, "unit"): "arcsin arccos arctanh",
    (jax.scipy.special, "normal"): "erf erfc expit i0 i0e i1 i1e ndtr log_ndtr",
    (jax.scipy.special, "positive"): "gammaln digamma entr",
    (jax.scipy.special, "unit"): "erfinv logit ndtri",
    (jnp.linalg, "definite"): "norm det inv slogdet cholesky eigvalsh qr pinv",
    (jax.scipy.linalg, "definite"): "expm",
}
BINARY = {
    (jnp, "normal"): "add subtract multiply divide maximum minimum logaddexp logaddexp2 hypot arctan2 inner",
    (jnp, "positive"): "power fmod",
    (jax.scipy.special, "positive"): "rel_entr kl_div xlogy xlog1py betaln",
}
SYSTEM = (SQUARE, "definite"), ((3,), "normal")
LINALG_SETTINGS = dict(added=("cotangents", "dtypes"))
"""Other kinds of extra data may make a matrix singular."""


def flash_attention(q, k, v, block=2):
    """Compute softmax attention over one block of keys after another, in float32."""
    scale = q.shape[-1] ** -0.5
    blocks = lambda a: a.reshape(-1, block, a.shape[-1])  # noqa: E731

    def step(state, of):
        most, total, y = state
        scores = jnp.matmul(q, of[0].T, preferred_element_type=jnp.float32) * scale
        new = jnp.maximum(most, scores.max(-1))
        p, decay = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
        y = y * decay[:, None] + jnp.matmul(p.astype(v.dtype), of[1], preferred_element_type=jnp.float32)
        return (new, total * decay + p.sum(-1), y), None

    start = (
        jnp.full(q.shape[0], -1e30, jnp.float32),
        jnp.zeros(q.shape[0], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    (_, total, y), _ = lax.scan(step, start, (blocks(k), blocks(v)))
    return (y / total[:, None]).astype(q.dtype)


def selective_scan(x, delta, a, b, c):
    """Compute Mamba's h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t, y_t = C_t · h_t in float32.

    Δ is softplus(delta), A is -a, B is b, and C is c.
    """
    wide = [v.astype(jnp.float32) for v in (x, jax.nn.softplus(delta), b, c)]

    def step(h, of):
        x, delta, b, c = of
        h = jnp.exp(-delta[:, None] * a.astype(jnp.float32)) * h + (delta * x)[:, None] * b
        return h, h @ c

    _, y = lax.scan(step, jnp.zeros(a.shape, jnp.float32), tuple(wide))
    return y.astype(x.dtype)


def llama_rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    return scale * (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def llama_mlp(x, gate, up):
    return jax.nn.silu((x @ gate).astype(jnp.float32)).astype(x.dtype) * (x @ up)


def rotary_embedding(x):
    angle = jnp.outer(jnp.arange(x.shape[0], dtype=jnp.float32), jnp.array([1.0, 0.01]))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def dot_product_attention(q, k, v):
    return jax.nn.dot_product_attention(*(a[None, :, None] for a in (q, k, v)))


def public_functions() -> list[PublicFunction]:
    found = []
    for table, count in ((UNARY, 1), (BINARY, 2)):
        for (module, kind), names in table.items():
            is_matrix = kind == "definite"
            for name in names.split():
                shape, settings = (SQUARE, LINALG_SETTINGS) if is_matrix else (X, {})
                function = getattr(module, name)
                found.append(PublicFunction(f"{module.__name__}.{name}", function, ((shape, kind),) * count, settings))
    normal, positive = (X, "normal"), (X, "positive")
    stats = jax.scipy.stats
    other = {
        "jax.numpy.matmul": (jnp.matmul, (X, (4, 2))),
        "jax.numpy.convolve": (jnp.convolve, ((5,), (3,))),
        "jax.numpy.outer": (jnp.outer, (ROW, (3,))),
        "jax.numpy.clip": (functools.partial(jnp.clip, min=-0.7, max=0.5), (X,)),
        "jax.scipy.stats.norm.logpdf": (stats.norm.logpdf, (X,)),
        "jax.scipy.stats.norm.cdf": (stats.norm.cdf, (X,)),
        "jax.scipy.stats.logistic.logpdf": (stats.logistic.logpdf, (X,)),
        "jax.scipy.stats.laplace.logpdf": (stats.laplace.logpdf, (X,)),
        "jax.scipy.stats.cauchy.logpdf": (stats.cauchy.logpdf, (X,)),
        "jax.nn.dot_product_attention": (dot_product_attention, (X, X, X)),
        "llama.rms_norm": (llama_rms_norm, (X, ROW)),
        "llama.mlp": (llama_mlp, (X, (4, 3), (4, 3))),
        "llama.rotary_embedding": (rotary_embedding, (X,)),
        "port.flash_attention": (flash_attention, (ROW + ROW, ROW + ROW, ROW + ROW)),
        "port.selective_scan": (selective_scan, ((3, 2), (3, 2), (2, 4), (3, 4), (3, 4))),
    }
    found += [PublicFunction(n, f, tuple((shape, "normal") for shape in shapes)) for n, (f, shapes) in other.items()]
    found += [
        PublicFunction("jax.scipy.stats.gamma.logpdf", stats.gamma.logpdf, (positive, positive)),
        PublicFunction("jax.scipy.stats.expon.logpdf", stats.expon.logpdf, (positive,)),
        PublicFunction("jax.scipy.stats.t.logpdf", stats.t.logpdf, (normal, positive)),
        PublicFunction("jax.scipy.stats.beta.logpdf", stats.beta.logpdf, ((X, "unit"), positive, positive)),
        PublicFunction("jax.numpy.linalg.solve", jnp.linalg.solve, SYSTEM, LINALG_SETTINGS),
    ]
    for package in (_optax, _distrax, _lineax, _jaxopt):
        try:
            found += package()
        except (ImportError, AttributeError):  # not installed, or incompatible with this JAX
            continue
    return found


def _optax() -> Sequence[PublicFunction]:
    import optax

    normal, rows, positive = (X, "normal"), (X, "rows"), (X, "positive")
    losses = optax.losses
    of = lambda name, *arguments, **options: PublicFunction(  # noqa: E731
        f"optax.{name}", functools.partial(getattr(losses, name), **options), arguments
    )
    names = (
        "l2_loss squared_error huber_loss log_cosh cosine_similarity cosine_distance hinge_loss ranking_softmax_loss"
    )
    return [
        *(of(name, normal, normal) for name in names.split()),
        *(of(name, normal, rows) for name in ("softmax_cross_entropy", "safe_softmax_cross_entropy")),
        of("poly_loss_cross_entropy", normal, rows),
        of("sigmoid_binary_cross_entropy", normal, (X, "unit")),
        of("sigmoid_focal_loss", normal, (X, "unit")),
        of("kl_divergence", normal, rows),
        of("convex_kl_divergence", normal, rows),
        of("generalized_kl_divergence", normal, positive),
        of("softmax_cross_entropy_with_integer_labels", normal, labels=LABELS),
        of("multiclass_hinge_loss", normal, labels=LABELS),
        of("multiclass_perceptron_loss", normal, labels=LABELS),
        of("triplet_margin_loss", normal, normal, normal),
    ]


def _distrax() -> Sequence[PublicFunction]:
    import distrax

    located = (X, "normal"), (X, "normal"), (X, "positive")
    functions = {
        "Normal.log_prob": (lambda x, m, s: distrax.Normal(m, s).log_prob(x), located),
        "Laplace.log_prob": (lambda x, m, s: distrax.Laplace(m, s).log_prob(x), located),
        "Categorical.entropy": (lambda x: distrax.Categorical(logits=x).entropy(), located[:1]),
        "Categorical.log_prob": (lambda x: distrax.Categorical(logits=x).log_prob(LABELS), located[:1]),
    }
    return [PublicFunction(f"distrax.{name}", *function) for name, function in functions.items()]


def _lineax() -> Sequence[PublicFunction]:
    import lineax

    solve = lambda a, b: lineax.linear_solve(lineax.MatrixLinearOperator(a), b).value  # noqa: E731
    return [PublicFunction("lineax.linear_solve", solve, SYSTEM, LINALG_SETTINGS)]


def _jaxopt() -> Sequence[PublicFunction]:
    import jaxopt

    normal = ((ROW, "normal"),)
    return [
        PublicFunction("jaxopt.projection.projection_simplex", jaxopt.projection.projection_simplex, normal),
        PublicFunction("jaxopt.projection.projection_l2_ball", jaxopt.projection.projection_l2_ball, normal),
        PublicFunction("jaxopt.prox.prox_lasso", jaxopt.prox.prox_lasso, normal),
    ]

"""The table of peers. A peer is imported by its function here, so that the bench runs without its library."""

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.measure import floats, time_compiled
from experiments.bench.peers import Task, Variant
from experiments.bench.workloads import document_offsets, forward_and_backward, forward_only, one_after_another

EPS = 1e-5  # the default of jaxbp's norms


class Peer(NamedTuple):
    version: str
    variants: Callable[[Task], Iterable[Variant]]


def installed(names: Collection[str] = ()) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be imported, and the errors of the others, by name: of all peers, or of `names`."""
    peers, errors = {}, {}
    for name in names or PEERS:
        try:
            peers[name] = PEERS[name]()
        except Exception as error:  # a broken installation can raise anything
            errors[name] = " ".join(str(error).split())
    return peers, errors


def module(name: str) -> Peer:
    found = importlib.import_module(f"experiments.bench.peers.{name}")
    return Peer(found.VERSION, found.variants)


EAGER = {"linear_softmax_cross_entropy"}
"""Ops for which a peer may read a tensor on the host, which a CUDA graph cannot capture."""


def on_torch(package: str, forwards: Mapping[str, Callable], backwards: Mapping[str, Callable]) -> Peer:
    """Return a peer that consists of functions of PyTorch tensors, timed in eager mode and in CUDA graphs.

    `forwards` and `backwards` map names of ops to functions. Functions in `backwards` return gradients. PyTorch's
    autograd differentiates the functions in `forwards`. `package` is the package whose version is reported.
    """
    from experiments.bench.peers.torch import ops, variants_of

    def variants(task):
        if task.op not in forwards | backwards:
            return []
        found = variants_of(task, ops(forwards, backwards), [], best=2 if task.op in EAGER else 1)
        keep_all = task.op not in EAGER or task.choice == "all"
        return [variant for variant in found if keep_all or variant[0].startswith("eager")]

    return Peer(metadata.version(package), variants)


def causal_conv1d() -> Peer:
    """Return the peer causal-conv1d, the depthwise convolution of Mamba's authors."""
    from causal_conv1d import causal_conv1d_fn

    from experiments.bench.peers.torch import depthwise_conv1d

    convolve = functools.partial(depthwise_conv1d, lambda x, w, b: causal_conv1d_fn(x, w[:, 0], b, activation=None))
    return on_torch("causal-conv1d", {"conv1d": convolve}, {})


def liger() -> Peer:
    """Return the peer Liger-Kernel: its norms, and its dense layer with cross-entropy."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction, layer_norm_backward
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def linear_softmax_cross_entropy(x, w, labels, b=None, *, reduction="mean"):
        return LigerFusedLinearCrossEntropyFunction.apply(x, w, labels, b, None, -100, 0.0, 0.0, reduction or "none")[0]

    def backward(dy, x, scale, mean, inv_std):
        return layer_norm_backward(dy, x, scale, scale, mean, inv_std)  # reads only the dtype of the bias

    forwards = {
        "layer_norm": lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, EPS),
        "linear_softmax_cross_entropy": linear_softmax_cross_entropy,
        "rms_norm": lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPS, 0.0, "gemma", False),
    }
    return on_torch("liger-kernel", forwards, {"layer_norm_backward": backward})


def liger_cute() -> Peer:
    """Return the peer Liger-Kernel in the CuTe DSL: its dense layer with cross-entropy, for Hopper."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import LigerFusedLinearCrossEntropySM90Function

    def linear_softmax_cross_entropy(x, w, labels, *, reduction="mean"):
        return LigerFusedLinearCrossEntropySM90Function.apply(x, w, labels, -100, reduction)

    return on_torch("liger-kernel", {"linear_softmax_cross_entropy": linear_softmax_cross_entropy}, {})


def quack() -> Peer:
    """Return the peer QuACK: its norms, and its dense layer with cross-entropy."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm, rmsnorm_bwd
    from torch.autograd import Function

    class LayerNorm(Function):
        @staticmethod
        def forward(ctx, x, scale, bias):
            y, inv_std, mean = layernorm_fwd(x, scale.float(), bias.float(), EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, scale, inv_std, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, scale, inv_std, mean = ctx.saved_tensors
            return layernorm_bwd(x, scale, dy, inv_std, mean)

    def linear_softmax_cross_entropy(x, w, labels, *, reduction="mean"):
        return chunked_linear_cross_entropy(x, w, labels, reduction=reduction)

    forwards = {
        "layer_norm": LayerNorm.apply,
        "linear_softmax_cross_entropy": linear_softmax_cross_entropy,
        "rms_norm": lambda x, scale: rmsnorm(x, scale, eps=EPS),
    }
    backwards = {
        "layer_norm_backward": lambda dy, x, scale, mean, inv_std: layernorm_bwd(x, scale, dy, inv_std, mean),
        "rms_norm_backward": lambda dy, x, scale, inv_rms: rmsnorm_bwd(x, scale, dy, inv_rms)[:2],
    }
    return on_torch("quack-kernels", forwards, backwards)


def cudnn() -> Peer:
    """cuDNN's norms, through the PyTorch operators of NVIDIA's cuDNN frontend."""
    import torch
    from cudnn.ops.norm import layer_norm, rms_norm  # importing these functions registers the operators

    def rows(a):
        return a.reshape(-1, a.shape[-1], 1, 1)

    def layer_norm_backward(dy, x, scale, mean, inv_std):
        statistics = (a.reshape(-1, 1, 1, 1) for a in (mean, inv_std))
        dx, *gradients = torch.ops.cudnn.layernorm_bwd(rows(dy), rows(x), rows(scale.float()), *statistics)
        return dx.reshape(x.shape), *(a.reshape(scale.shape) for a in gradients)

    def rms_norm_backward(dy, x, scale, inv_rms):
        dx, dscale, _ = torch.ops.cudnn.rmsnorm_bwd(rows(dy), rows(x), rows(scale), inv_rms.reshape(-1, 1, 1, 1))
        return dx.reshape(x.shape), dscale.reshape(scale.shape)

    forwards = {
        "layer_norm": lambda x, scale, bias: layer_norm(x, scale.shape, scale, bias, EPS),
        "rms_norm": lambda x, scale: rms_norm(x, scale, eps=EPS),
    }
    backwards = {"layer_norm_backward": layer_norm_backward, "rms_norm_backward": rms_norm_backward}
    return on_torch("nvidia-cudnn-frontend", forwards, backwards)


def on_jax(package: str, forwards: Mapping[str, Mapping[str, Callable]], **compiler_options: bool) -> Peer:
    """Return a peer with functions of JAX arrays, which is timed with its gradients. `forwards[op][variant]` is a
    function. `package` is the installed package whose version the peer has. `compiler_options` are options of XLA."""

    def measure(task, forward):
        op = functools.partial(forward, **task.options)
        function = forward_only(op) if task.forward else forward_and_backward(op)
        sets = tuple(task.sets)
        program = jax.jit(one_after_another(function, task.calls)).lower(sets).compile(compiler_options)
        timed = time_compiled(program, sets, task.calls, task.seconds, bursts=task.bursts)
        small = jax.jit(function).lower(*task.small).compile(compiler_options)
        return timed | {"results": floats(small(*task.small))}

    def variants(task):
        named = forwards.get(task.op, {}).items()
        return [(name, None, functools.partial(measure, task, forward)) for name, forward in named]

    return Peer(metadata.version(package), variants)


def tokamax() -> Peer:
    """tokamax's norms, with Triton kernels, and its attention and grouped products, with Mosaic GPU kernels."""
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # otherwise, tokamax parses this program's command line

    def document_attention(q, k, v, ids, *, is_causal=False):
        from tokamax._src.ops.attention import api, base  # the public function has no documents

        bounds = (jax.vmap(functools.partial(jnp.searchsorted, side=side))(ids, ids) for side in ("left", "right"))
        start, end = (a[:, None] for a in bounds)
        mask = base.Mask(k_start=start, k_end=None if is_causal else end, is_causal=is_causal)
        return api.IMPLEMENTATIONS["mosaic_gpu"](q, k, v, mask=mask)

    rms_norm = functools.partial(tokamax.layer_norm, offset=None, epsilon=EPS, subtract_mean=False)
    with_mosaic = {
        "document_attention": document_attention,
        "dot_product_attention": functools.partial(tokamax.dot_product_attention, implementation="mosaic"),
        "grouped_linear": functools.partial(tokamax.ragged_dot, implementation="mosaic"),
    }
    forwards = {"layer_norm": functools.partial(tokamax.layer_norm, epsilon=EPS), "rms_norm": rms_norm}
    return on_jax(
        "tokamax",
        {op: {"default": forward} for op, forward in forwards.items()}
        | {op: {"Mosaic": forward} for op, forward in with_mosaic.items()},
    )


def fa4() -> Peer:
    """fa4-jax, FlashAttention's kernels in the CuTe DSL. Its gradients are added with atomics."""
    from fa4_jax import flash_attn, flash_attn_varlen

    def attention(q, k, v, bias=None, *, is_causal=False, local_window_size=None):
        if bias is not None:
            raise NotImplementedError("a bias")
        window = None if local_window_size is None else (local_window_size, local_window_size)
        return flash_attn(q, k, v, causal=is_causal, window_size=window)

    def document_attention(q, k, v, ids, *, is_causal=False):
        offsets = jnp.asarray(document_offsets(*ids.shape))
        packed = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
        return flash_attn_varlen(*packed, offsets, offsets, causal=is_causal).reshape(q.shape)

    forwards = {"dot_product_attention": {"attention": attention}, "document_attention": {"packed": document_attention}}
    return on_jax("fa4-jax", forwards)


def jax_cudnn(**compiler_options: bool) -> Peer:
    """cuDNN's attention, as XLA calls it on a GPU."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    forwards = {"dot_product_attention": {"attention": attention}} if jax.default_backend() == "gpu" else {}
    return on_jax("jax", forwards, **compiler_options)


PEERS: Mapping[str, Callable[[], Peer]] = {
    "PyTorch": functools.partial(module, "torch"),
    "causal-conv1d": causal_conv1d,
    "Liger-Kernel": liger,
    "Liger-Kernel (CuTe)": liger_cute,
    "QuACK": quack,
    "cuDNN": cudnn,
    "tokamax": tokamax,
    "fa4-jax": fa4,
    "JAX's cuDNN": jax_cudnn,
    "JAX's cuDNN, deterministic": functools.partial(jax_cudnn, xla_gpu_deterministic_ops=True),
    "torchlogix": functools.partial(module, "torchlogix"),
    "published automaton": functools.partial(module, "published_automaton"),
}

"""Time PyTorch's ops and training steps.

In training steps, CUDA graphs include the update of the parameters, except in the mode "compile, reduce-overhead".
"""

import collections
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.bench.gpt_workload import ADAMW
from experiments.bench.measure import ROUNDS, microseconds, settling_seconds
from experiments.bench.peers import Task, Variant
from experiments.bench.peers.torch_gpt import TorchGPT
from experiments.bench.workloads import document_offsets
from jaxbp.verify.timing import burst_seconds, settle

VERSION = torch.__version__
EPS = 1e-5  # the default of jaxbp's norms
Functions = Mapping[str, Callable]
aten = torch.ops.aten
FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def variants(task: Task) -> Iterator[Variant]:
    if task.op == "lenet":
        sgd = functools.partial(torch.optim.SGD, lr=0.01, fused=True)
        # One of the last two was the fastest at each batch size and precision.
        modes = [COMPILED_STEP, COMPILED_GRAPH, CHANNELS_LAST]
        yield from variants_of(task, training(_lenet, sgd), modes, best=2)
    elif task.op == "gpt":
        yield from variants_of(task, training(gpt, adamw), [COMPILED_GRAPH])
    elif task.op == "dot_product_attention" and "local_window_size" not in task.options:
        yield from variants_of(task, ops(FORWARDS, BACKWARDS), [])
    elif task.op == "document_attention":
        yield from variants_of(task, ops(FORWARDS, BACKWARDS), ["compile, CUDA graph"])
        # PyTorch 2.11 cannot capture the backward, but a launch takes little of these steps.
        for name, *variant in variants_of(task, ops({task.op: _packed_attention}, {}), [], best=2):
            yield f"packed, {name}", *variant
    elif task.op in FORWARDS | BACKWARDS:
        yield from variants_of(task, ops(FORWARDS, BACKWARDS), ["compile, CUDA graph"])


COMPILED_STEP, COMPILED_LAYERS = "compile, reduce-overhead", "compiled layers, CUDA graph"
COMPILED_GRAPH, CHANNELS_LAST = "compile, CUDA graph", "compile, channels last, CUDA graph"
COMPILE_SECONDS = 180.0
Build = Callable[[Task, str], tuple[Callable, Callable, dict[str, Any]]]
"""A function `(task, mode) -> (call, results, fields)` that prepares a task in a mode, such as "eager".

`call(i)` makes the i-th call of the task. `results()` returns the results for `task.small`. `fields` are further fields
of the row.
"""


def variants_of(task: Task, build: Build, modes: Sequence[str], best: int = 1) -> Iterator[Variant]:
    """Yield a task's variants, one per precision and mode: "eager", and on a GPU also "CUDA graph" and `modes`.

    If `task.choice` is "best", yield only the last `best` modes in this order, at the task's precision. `modes` must
    therefore end with the modes that may be the fastest.
    """
    modes, precisions = ["eager", *(["CUDA graph", *modes] if torch.cuda.is_available() else [])], {"": None}
    if torch.cuda.is_available() and task.products and task.dtype == "float32":
        precisions = {", float32": "highest", ", TF32": "default"}
    if task.choice == "best":
        modes = modes[-best:]
        precisions = {suffix: name for suffix, name in precisions.items() if name in (None, task.precision)}
    for suffix, precision in precisions.items():
        for mode in modes:
            yield f"{mode}{suffix}", precision, functools.partial(measure, task, build, mode, precision == "default")


def measure(task: Task, build: Build, mode: str, tf32: bool) -> dict[str, Any]:
    """Time a task in one mode, such as "CUDA graph". Return fields of `measure.MEASURED`, and `results`.

    `results` are computed from `task.small` in eager mode, which needs no second compilation.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True  # PyTorch times cuDNN's algorithms, as XLA does
    torch.compiler.reset()
    try:
        call, results, fields = build(task, mode)
        measured = fields | {"results": results() if task.small else None}
        if mode != COMPILED_STEP:  # PyTorch does not count the memory of its CUDA graphs
            measured |= _memory(call)
        program = lambda: [call(i) for i in range(task.calls)]  # noqa: E731
        if mode.endswith("CUDA graph"):
            program = _captured(program)
        rounds, in_bursts = _seconds(program, task.seconds, task.bursts)
        return measured | microseconds(rounds, task.calls, in_bursts)
    finally:
        call = results = program = None
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def ops(forwards: Functions, backwards: Functions) -> Build:
    """Return a function `(task, mode) -> (call, results, fields)`: see `Build`.

    Functions in `backwards` return gradients. For a function in `forwards`, PyTorch's autograd also computes gradients.
    """

    def build(task, mode):
        op = functools.partial((forwards | backwards)[task.op], **task.options)
        eager, function = op, op
        if mode.startswith("compile"):
            function = torch.compile(lambda *arrays: op(*arrays), dynamic=False)
        if task.op in forwards:
            run = _forward_only if task.forward else _forward_and_backward
            eager, function = (functools.partial(run, f) for f in (eager, function))
        sets = [_tensors(task, arguments) for arguments in task.sets]
        return lambda i: function(*sets[i % len(sets)]), lambda: _numpy(eager(*_tensors(task, task.small))), {}

    return build


def _tensors(task, arguments):
    arguments = jax.tree.map(tensor, arguments)
    if task.op == "max_pool2d_backward":
        dy, indices = arguments
        return dy, _flat_indices(indices, **task.options)
    if task.op in ("layer_norm_backward", "rms_norm_backward"):
        return *arguments, *_statistics(arguments[1], centered=task.op == "layer_norm_backward")
    if task.op == "layer_norm_linear_backward":
        _, x, scale, bias, _ = arguments
        return *arguments, _layer_norm(x, scale, bias), *_statistics(x, centered=True)
    if "_backward" not in task.op:
        for a in jax.tree.leaves(arguments[0]):
            a.requires_grad_(a.is_floating_point())
    return arguments


def _statistics(x, *, centered):
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    if centered:
        return mean, torch.rsqrt(variance + EPS)
    return (torch.rsqrt(variance + mean**2 + EPS),)


def tensor(a):
    shared = torch.from_dlpack(a)
    return shared if shared.is_floating_point() else shared.long()


def _flat_indices(indices, *, input_size, window, stride=None, padding=0):
    # jaxbp's indices are positions in a window. PyTorch's are positions in an image.
    window, padding = _pair(window), _pair(padding)
    stride = window if stride is None else _pair(stride)
    rows, columns = (
        torch.arange(n, device=indices.device) * s - p
        for n, s, p in zip(indices.shape[2:], stride, padding, strict=True)
    )
    return (rows[:, None] + indices // window[1]) * input_size[1] + columns + indices % window[1]


def _pair(value):
    return [value, value] if isinstance(value, int) else list(value)


def _forward_only(function, arrays, _):
    with torch.no_grad():
        y = function(*arrays)
    return list(y) if isinstance(y, tuple) else [y]


def _forward_and_backward(function, arrays, cotangents):
    y = function(*arrays)
    results = list(y) if isinstance(y, tuple) else [y]
    floating = [a for a in results if a.is_floating_point()]
    wanted = [a for a in jax.tree.leaves(arrays) if a.requires_grad]
    return results + list(torch.autograd.grad(floating, wanted, cotangents))


def _conv2d_backward(dy, x, w, wanted, stride=1, padding=0):
    # `wanted` is 0 for the gradient with respect to x, and 1 for w.
    none = [False, False, False]
    none[wanted] = True
    stride, padding = _pair(stride), _pair(padding)
    return [aten.convolution_backward(dy, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, none)[wanted]]


def _conv2d_backward_input(dy, w, *, input_size, **options):
    return _conv2d_backward(dy, dy.new_empty(len(dy), w.shape[1], *input_size), w, 0, **options)


def _conv2d_backward_weights(dy, x, *, filter_size, **options):
    return _conv2d_backward(dy, x, dy.new_empty(dy.shape[1], x.shape[1], *_pair(filter_size)), 1, **options)


def _max_pool2d_backward(dy, indices, *, input_size, window, stride=None, padding=0):
    window = _pair(window)
    stride = window if stride is None else _pair(stride)
    x = dy.new_empty(*dy.shape[:2], *input_size)  # PyTorch reads only its shape
    return [aten.max_pool2d_with_indices_backward(dy, x, window, stride, _pair(padding), [1, 1], False, indices)]


def _layer_norm_backward(dy, x, scale, mean, inv_std):
    rows = mean[:, None], inv_std[:, None]
    return aten.native_layer_norm_backward(dy, x, scale.shape, *rows, scale, torch.zeros_like(scale), [True] * 3)


def _rms_norm_backward(dy, x, scale, inv_rms):
    return aten._fused_rms_norm_backward(dy, x, scale.shape, inv_rms[:, None], scale, [True] * 2)


def _layer_norm(x, scale, bias):
    return F.layer_norm(x, scale.shape, scale, bias, EPS)


def _layer_norm_linear_backward(dy, x, scale, bias, w, normalized, mean, inv_std):
    dx, dscale, dbias = _layer_norm_backward(dy @ w, x, scale, mean, inv_std)
    return [dx, dscale, dbias, dy.T @ normalized, dy.sum(0)]


def _softmax_cross_entropy_backward(dy, logits, labels):
    if labels.is_floating_point():
        return [dy[:, None] * (torch.softmax(logits, -1) * labels.sum(-1, keepdim=True) - labels)]
    log_probabilities = torch.log_softmax(logits, -1)
    total_weight = logits.new_empty(())  # PyTorch reads it only if the reduction is "mean"
    d = aten.nll_loss_backward(dy, log_probabilities, labels, None, 0, -100, total_weight)
    return [aten._log_softmax_backward_data(d, log_probabilities, -1, logits.dtype)]


def _dot_product_attention(q, k, v, bias=None, *, local_window_size=None, **options):
    if local_window_size is not None:
        return _flex_attention(q, k, v, **options, window=local_window_size)
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    with sdpa_kernel([*FASTEST_FIRST, SDPBackend.MATH], set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=q.shape[1] != k.shape[1], **options)
    return y.transpose(1, 2)


def _flex_attention(q, k, v, ids=None, *, is_causal=False, window=None):
    mask = _block_mask(q.shape[1], q.device, ids, is_causal, window)
    return flex_attention(*(a.transpose(1, 2) for a in (q, k, v)), block_mask=mask).transpose(1, 2)


@torch.compiler.disable
@functools.lru_cache(4)
def _block_mask(length, device, ids, is_causal, window):
    def is_valid(batch, head, query, key):
        valid = query >= key if is_causal else query >= 0
        valid = valid if window is None else valid & (torch.abs(query - key) <= window)
        return valid if ids is None else valid & (ids[batch, query] == ids[batch, key])

    return create_block_mask(is_valid, None if ids is None else len(ids), None, length, length, device)


def _packed_attention(q, k, v, ids, *, is_causal=False):
    """Call cuDNN with the documents as sequences of different lengths."""
    offsets, longest = _offsets(*ids.shape, q.device)
    arrays, lengths = (a.flatten(0, 1) for a in (q, k, v)), (offsets, offsets, longest, longest)
    y, *_ = aten._cudnn_attention_forward(*arrays, None, *lengths, torch.is_grad_enabled(), 0.0, is_causal)
    return y.view(q.shape)


@functools.cache
def _offsets(batch, length, device):
    offsets = torch.from_numpy(document_offsets(batch, length))
    return offsets.to(device), int(offsets.diff().max())


def depthwise_conv1d(convolve: Callable, x, w, b, *, padding, groups, dimension_numbers):
    """Return a causal depthwise convolution, computed by `convolve`.

    `dimension_numbers` has the layouts of x, of w, and of the result. `convolve(x, w, b)` is causal. It takes x in NCW
    and w in OIW, and returns NCW.

    Raises:
      NotImplementedError: `padding` is not "CAUSAL", or `groups` is not the length of b.
    """
    if padding != "CAUSAL" or groups != len(b):
        raise NotImplementedError(f"padding={padding!r} and groups={groups}")
    x_layout, w_layout, y_layout = dimension_numbers
    x, w = x.permute([x_layout.index(axis) for axis in "NCW"]), w.permute([w_layout.index(axis) for axis in "OIW"])
    return convolve(x, w, b).permute(["NCW".index(axis) for axis in y_layout])


def _causal(x, w, b):
    return F.conv1d(x, w, b, padding=w.shape[2] - 1, groups=len(w))[..., : x.shape[2]]


def _grouped_linear(x, w, group_sizes):
    multiply = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    return multiply(x, w, offs=group_sizes.cumsum(0).to(torch.int32))


def _mixture_of_experts(parameters, x, *, experts_per_token):
    logits = x.float() @ parameters["router"].float()
    probabilities, (tokens, experts) = logits.softmax(-1), logits.shape
    chosen = logits.topk(experts_per_token).indices
    weights = probabilities.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    selected = chosen.flatten()
    sizes = (selected[:, None] == torch.arange(experts, device=x.device)).sum(0)
    order = selected.argsort(stable=True)
    rows = x.repeat_interleave(experts_per_token, 0)[order]
    gate, up = _grouped_linear(rows, parameters["gate_up"], sizes).chunk(2, -1)
    rows = _grouped_linear(F.silu(gate) * up, parameters["down"], sizes)
    rows = rows[order.argsort()].view(tokens, experts_per_token, -1)
    y = (weights[..., None] * rows.float()).sum(1).to(x.dtype)
    balance = experts * (sizes / selected.numel() * probabilities.mean(0)).sum()
    return y, balance, (logits.logsumexp(-1) ** 2).mean()


BACKWARDS = {
    "relu_backward": lambda dy, x: [aten.threshold_backward(dy, x, 0)],
    "linear_backward": lambda dy, x, w: [dy @ w, dy.T @ x, dy.sum(0)],
    "conv2d_backward_input": _conv2d_backward_input,
    "conv2d_backward_weights": _conv2d_backward_weights,
    "conv2d_backward_bias": lambda dy: [dy.sum((0, 2, 3))],
    "max_pool2d_backward": _max_pool2d_backward,
    "softmax_cross_entropy_backward": _softmax_cross_entropy_backward,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_linear_backward": _layer_norm_linear_backward,
}
FORWARDS = {
    "relu": F.relu,
    "embedding": F.embedding,
    "linear": F.linear,
    "grouped_linear": _grouped_linear,
    "mixture_of_experts": _mixture_of_experts,
    "conv2d": F.conv2d,
    "conv1d": functools.partial(depthwise_conv1d, _causal),
    "max_pool2d": lambda x, *, window, **options: F.max_pool2d(x, window, **options),
    "max_pool2d_with_indices": lambda x, *, window, **options: F.max_pool2d(x, window, return_indices=True, **options),
    "document_attention": _flex_attention,
    "dot_product_attention": _dot_product_attention,
    "softmax_cross_entropy": functools.partial(F.cross_entropy, reduction="none"),
    "linear_softmax_cross_entropy": lambda x, w, labels, b=None, *, reduction="mean": F.cross_entropy(
        F.linear(x, w, b), labels, reduction=reduction or "none"
    ),
    "conv2d_relu_max_pool2d": lambda x, w, b, *, window, **options: F.max_pool2d(
        F.relu(F.conv2d(x, w, b, **options)), window
    ),
    "layer_norm": _layer_norm,
    "rms_norm": lambda x, scale: F.rms_norm(x, scale.shape, scale, EPS),
    "layer_norm_linear": lambda x, scale, bias, w, b: F.linear(_layer_norm(x, scale, bias), w, b),
}


def training(make: Callable, optimizer_of: Callable) -> Build:
    """Return a function `(task, mode) -> (call, results, fields)`: see `Build`.

    `make(task, arguments)` returns a model, its parameters in the order of jaxbp's gradients, and a function
    `model -> loss`.
    """

    def build(task, mode):
        model, parameters, loss_of = make(task, task.sets[0])
        if mode == CHANNELS_LAST:
            model.to(memory_format=torch.channels_last)
        optimizer, scaler = optimizer_of(parameters), _scaler(task, parameters)
        if mode == COMPILED_STEP:
            loss_of = torch.compile(loss_of, mode="reduce-overhead", dynamic=False)
        elif mode in (COMPILED_GRAPH, CHANNELS_LAST):
            loss_of = torch.compile(loss_of, dynamic=False)
        fields = compile_layers(model, loss_of) if mode == COMPILED_LAYERS else {}

        def step(i):
            if mode == COMPILED_STEP:
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            return []

        def results():
            model, parameters, loss_of = make(task, task.small)
            scaler = _scaler(task, parameters)
            loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer_of(parameters))
            scale = [scaler._scale] if scaler.is_enabled() else []
            return _numpy([loss, *(a.grad for a in parameters), *scale])

        return step, results, fields

    return build


def compile_layers(model: torch.nn.Sequential, loss_of: Callable) -> dict[str, Any]:
    """Compile layer after layer until `COMPILE_SECONDS` have passed.

    Return fields of the row: the time, and a note if layers remain.
    """
    layers = [layer for layer in model if next(layer.parameters(), None) is not None]
    started, compiled = time.perf_counter(), 0
    for layer in layers:
        layer.compile(dynamic=False)
        loss_of(model).backward()
        compiled += 1
        if (seconds := time.perf_counter() - started) > COMPILE_SECONDS:
            break
    fields = {"compile_seconds": seconds}
    if compiled < len(layers):
        fields["note"] = f"{compiled} of {len(layers)} layers were compiled in {seconds:.0f} s, the others are eager"
    return fields


def _scaler(task, parameters):
    return torch.amp.GradScaler(parameters[0].device.type, 2.0**15, enabled=task.dtype == "float16")


def _lenet(task, arguments):
    state, images, labels = arguments
    state = getattr(state, "parameters", state)
    nn, layers = torch.nn, collections.OrderedDict()
    layers |= {"conv1": nn.Conv2d(1, 6, 5), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2)}
    layers |= {"conv2": nn.Conv2d(6, 16, 5), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2), "flatten": nn.Flatten()}
    layers |= {"fc1": nn.Linear(256, 120), "relu3": nn.ReLU(), "fc2": nn.Linear(120, 84), "relu4": nn.ReLU()}
    model = nn.Sequential(layers | {"fc3": nn.Linear(84, 10)})
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    model.load_state_dict(dict(zip(names, map(tensor, jax.tree.leaves(state)), strict=True)))
    images, labels, dtype = tensor(images), tensor(labels), getattr(torch, task.dtype)

    def loss_of(model):
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            return F.cross_entropy(model(images), labels)

    model.to(images.device)
    return model, [dict(model.named_parameters())[name] for name in names], loss_of


def gpt(task: Task, arguments: tuple) -> tuple[TorchGPT, list[torch.Tensor], Callable]:
    state, tokens, targets = arguments
    state = getattr(state, "parameters", state)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    parameters = {
        name: tensor(a).clone().requires_grad_() for name, a in zip(names, jax.tree.leaves(state), strict=True)
    }
    tokens, targets = tensor(tokens), tensor(targets)

    def loss_of(model):
        with sdpa_kernel([*FASTEST_FIRST, SDPBackend.MATH], set_priority=True):
            return model.loss(tokens, targets)

    return TorchGPT(parameters, task.options, getattr(torch, task.dtype)), list(parameters.values()), loss_of


def adamw(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    # Within a CUDA graph, the number of steps must be on the GPU.
    options = dict(fused=True, capturable=torch.cuda.is_available())
    return torch.optim.AdamW(parameters, **ADAMW, **options)


def _captured(program: Callable) -> Callable:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            program()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        program()
    return graph.replay


def _seconds(program: Callable, seconds: float, bursts: bool) -> tuple[list[float], float | None]:
    def run(calls):
        return _time(program, calls) * calls

    for _ in range(3):
        once = _time(program, 1)
    repeats = max(2, min(2000, int(seconds / once)))
    in_bursts = burst_seconds(run) if bursts else None
    settle(run, once, settling_seconds())
    return [_time(program, repeats) for _ in range(ROUNDS)], in_bursts


def _time(program: Callable, repeats: int) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(repeats):
            program()
        return (time.perf_counter() - start) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        program()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _memory(call: Callable) -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    call(0)  # lets cuDNN choose its algorithms
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call(0)
    peak = torch.cuda.max_memory_allocated()
    return {"temporary_bytes": peak - before - sum(a.nbytes for a in results), "peak_bytes": peak}


def _numpy(tensors) -> list[np.ndarray]:
    return [a.detach().double().cpu().numpy() for a in tensors if a.is_floating_point()]

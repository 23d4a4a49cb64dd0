"""Times every op of the library, and training steps of LeNet and of logic networks, side by side in one run.

    python -m experiments.bench                                        # everything
    python -m experiments.bench conv2d max_pool2d --json results.json  # some ops, each with its backwards
    python -m experiments.bench lenet --batch 128 8192 --precision highest
    python -m experiments.bench all --peers --json results.json        # and PyTorch on the same arrays

A backward is timed by itself, a forward together with its gradient (`fwd+bwd`), LeNet as forward, backward and SGD,
logic networks, on the bits of an image, as forward, backward and Adam.

- Time is device time: calls follow each other inside one compiled program, each with arrays of its own that together
  do not fit into the GPU's cache (at small batches they may: there are at most 32 calls), while further programs are
  queued behind it. It is the median of several rounds.
- The floor is the least time that this device could take: each argument read once and each result written once at the
  rate of a copy, or the multiplications and additions of products and convolutions at the rate of a large matrix
  product, whichever takes longer. Both rates are measured in the same run.
- Memory is XLA's account of the compiled program: arguments, results and temporaries of one call.
- The error is the largest relative norm of a result's difference from float64, at a smaller batch.
- Compile seconds are those of one call, from Python to the executable.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

import jaxbp
from experiments.atomic import write_atomically
from experiments.bench.report import picture, print_table
from experiments.errors import UserError
from jaxbp.catalogue import CATALOGUE, Entry
from jaxbp.nn import LeNet, LogicNetwork
from jaxbp.verify.timing import compile_program, device_seconds

PROGRAM_SECONDS, MOST_CALLS = 300e-6, 32
"""A program has so many calls that the device needs at least this long, ten times what it takes to dispatch one."""
CACHE_BYTES = 128 * 2**20
"""The arguments of a program's calls together exceed this, twice the cache of an H200."""
ROUNDS = 5
ERROR_BATCH = 128
"""The largest batch at which results are compared with float64."""


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What to time."""

    cases: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """`lenet`, `logic` (6 x 8000 gates), `logic-large` (6 x 64000), names of ops, or `all`. A forward's name stands for
    its backwards as well."""
    batch: tuple[int, ...] = ()
    """Batch sizes. By default 16384 for ops, or what their place says, 128, 1024, 8192, 65536 for LeNet and 128, 1024
    for logic networks; without a GPU 256 for ops, else 128."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the arrays; LeNet's parameters are float32."""
    precision: Literal["default", "highest"] = "default"
    """Of products of float32: as the library likes it (TF32 on a GPU), or true float32."""
    implementations: tuple[Literal["pallas", "xla", "autodiff", "None"], ...] = ("pallas", "xla", "autodiff", "None")
    """Implementations to time."""
    batch_last: bool = False
    """Time ops, no steps of training, on arrays whose batch is the last axis, which is how kernels hand them to each
    other in a network: the transposes that examples first cost are then left to the compiler, which finds none."""
    peers: bool = False
    """Time other libraries too, where they are installed: PyTorch; for norms Liger-Kernel, QuACK and tokamax; and for
    logic networks torchlogix."""
    seconds: float = 0.03
    """Least time of a round."""
    json: Path | None = None
    """File to write the rows to, after every case."""
    png: Path | None = None
    """File to draw the rows to; by default beside the JSON file."""


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """Something to time.

    Attributes:
      op, place: where it stands in the table of ops.
      title: for people.
      options: the op's options.
      batches: the default, on a GPU and elsewhere.
      function: (implementation, dtype) -> the function of its arguments.
      draw: (seed, batch, dtype) -> arguments.
      chain: (function, calls) -> program of sets of arguments, which calls the function that many times.
      steps: the calls in a program, if they go on from each other's results and so from one set of arguments.
    """

    op: str
    place: str
    title: str
    options: Mapping[str, Any]
    batches: tuple[tuple[int, ...], tuple[int, ...]]
    function: Callable[[str | None, str], Callable]
    draw: Callable[[int, int, str], tuple]
    chain: Callable[[Callable, int], Callable]
    steps: int | None = None


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if an implementation failed, 2 for what the user can mend."""
    args = sys.argv[1:] if args is None else list(args)
    config = tyro.cli(
        BenchConfig, args=args, prog="python -m experiments.bench", config=(tyro.conf.FlagCreatePairsOff,)
    )
    try:
        check(config)
        works = selected(config.cases, config.batch_last)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.peers:
        # JAX has not started yet: leave the others room on the GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = run(works, config, shlex.join(["python", "-m", "experiments.bench", *args]))
    print_table(report)
    if (png := config.png or (config.json and config.json.with_suffix(".png"))) is not None:
        write_atomically(png, picture(report))
    return 1 if any(map(is_failure_of_ours, report["rows"])) else 0


def is_failure_of_ours(row: Mapping[str, Any]) -> bool:
    """Whether an implementation failed, other than by saying that it does not take the case."""
    return row["peer"] is None and row["failed"] is not None and not row["failed"].startswith("NotImplementedError")


def check(config: BenchConfig) -> None:
    """Raises UserError for a config that no run can have."""
    if min(config.batch, default=1) < 1:
        raise UserError(f"batch is {min(config.batch)}: wanted at least 1")
    if config.batch_last and config.peers:
        raise UserError("batch_last is not for peers: they take their arrays examples first")
    for path in (config.json, config.png):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")


def selected(cases: Sequence[str], batch_last: bool = False) -> list[Work]:
    """The work that the cases name, in the table's order; with the batch last, the ops among it."""
    works = [lenet_work(), *(op_work(entry, place) for entry in CATALOGUE for place in entry.real)]
    works += [logic_work("logic", 8000, (128,)), logic_work("logic-large", 64000, ())]
    ops = dict.fromkeys(work.op for work in works)
    if unknown := [case for case in cases if case not in ops and case != "all"]:
        raise UserError(f"unknown case {', '.join(unknown)}: wanted all or some of {', '.join(ops)}")
    works = [
        work
        for work in works
        if any(case in ("all", work.op) or work.op.startswith(f"{case}_backward") for case in cases)
    ]
    if not batch_last:
        return works
    if not (of_ops := [work for work in works if work.steps is None]):
        raise UserError(f"batch_last is for ops: wanted some beside {', '.join(cases)}, which are steps of training")
    return [with_batch_last(work) for work in of_ops]


def run(works: Sequence[Work], config: BenchConfig, command: str) -> dict[str, Any]:
    """Times the work and returns the report: what was measured where, and its rows. Writes it after every case."""
    device, on_gpu = jax.devices()[0], jax.default_backend() == "gpu"
    implementations = [name for name in config.implementations if on_gpu or name != "pallas"]
    if not on_gpu:
        print("no GPU: kernels would run in an interpreter, so pallas is left out; times are those of the CPU")
    peers = installed_peers() if config.peers else {}
    with jax.default_matmul_precision(config.precision):
        report = {
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device.device_kind,
            "platform": device.platform,
            "versions": versions() | {name: peer.VERSION for name, peer in peers.items()},
            "dtype": config.dtype,
            "precision": config.precision,
            **ceilings(config.dtype, on_gpu, config.seconds),
            "rows": [],
        }
        for work in works:
            for batch in config.batch or work.batches[0 if on_gpu else 1]:
                report["rows"] += rows(work, batch, implementations, peers, config, report)
                if config.json is not None:
                    write_atomically(config.json, to_json(report))
    return report


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {"python": sys.version.split()[0], "jaxbp": jaxbp.__version__} | {n: metadata.version(n) for n in names}


def to_json(report: Mapping[str, Any]) -> bytes:
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()


# ----------------------------------------------------------------------------------------------------------- the work


def op_work(entry: Entry, place: str) -> Work:
    """An op of the table at one of its places: a backward by itself, a forward with its gradient."""
    case, backward = entry.real[place], "_backward" in entry.name

    def function(implementation, dtype):
        op = functools.partial(entry.function, **case.options, implementation=implementation)
        return op if backward else forward_and_backward(op)

    def draw(seed, batch, dtype):
        arrays = case.draw(seed, batch, dtype)
        if backward:
            return arrays
        results = jax.eval_shape(functools.partial(entry.function, **case.options, implementation="autodiff"), *arrays)
        floats = [a for a in jax.tree.leaves(results) if _is_float(a)]
        keys = jax.random.split(jax.random.key(seed + 1000), len(floats))
        return arrays, [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, floats, strict=True)]

    title = f"{entry.name} {place}" if backward else f"{entry.name} fwd+bwd {place}"
    batches = (case.batch or 16384,), (256,)
    return Work(entry.name, place, title, case.options, batches, function, draw, one_after_another)


def forward_and_backward(op: Callable) -> Callable:
    """`(arrays, cotangents) -> (floating results, other results, gradients in the floating arrays)`."""

    def function(arrays, cotangents):
        floating = [i for i, a in enumerate(arrays) if _is_float(a)]

        def of_floats(*values):
            values = dict(zip(floating, values, strict=True))
            results = jax.tree.leaves(op(*(values.get(i, a) for i, a in enumerate(arrays))))
            return [a for a in results if _is_float(a)], [a for a in results if not _is_float(a)]

        results, vjp, others = jax.vjp(of_floats, *(arrays[i] for i in floating), has_aux=True)
        return results, others, vjp(cotangents)

    return function


def with_batch_last(work: Work) -> Work:
    """The same work on arrays that have the batch last where the work's have it first."""

    def structs(batch):
        arguments = jax.eval_shape(lambda: work.draw(0, batch, "float32"))
        return arguments, jax.eval_shape(work.function("autodiff", "float32"), *arguments)

    batched = jax.tree.map(lambda a, b: a.shape != b.shape, structs(2), structs(3))

    def moved(tree, batched, source, destination):
        return jax.tree.map(lambda a, move: jnp.moveaxis(a, source, destination) if move else a, tree, batched)

    def function(implementation, dtype):
        first = work.function(implementation, dtype)
        return lambda *arguments: moved(first(*moved(arguments, batched[0], -1, 0)), batched[1], 0, -1)

    def draw(seed, batch, dtype):
        return moved(work.draw(seed, batch, dtype), batched[0], 0, -1)

    return dataclasses.replace(work, title=f"{work.title}, batch last", function=function, draw=draw)


def one_after_another(function: Callable, calls: int) -> Callable:
    """A program of calls that wait for each other, each with its own set of arguments: they neither overlap nor merge.

    That holds on a GPU. XLA's compiler for the CPU drops the barriers early.
    """
    function = jax.jit(function)  # traced and lowered once

    def program(sets):
        results, done = [], jnp.zeros(())
        for arguments in sets[:calls]:
            arguments, done = lax.optimization_barrier((arguments, done))
            result, done = lax.optimization_barrier((function(*arguments), done))
            results.append(result)
        return results  # all of them: what nobody asks for is not computed

    return program


def lenet_work() -> Work:
    """LeNet's loss and gradients; in a program each call is a step of training."""

    def function(implementation, dtype):
        graph = nnx.graphdef(nnx.eval_shape(lambda: _lenet(implementation, dtype)))

        def loss(state, images, labels):
            return nnx.merge(graph, state).loss(images, labels)[0].mean()

        return jax.value_and_grad(loss)

    def draw(seed, batch, dtype):
        image_key, label_key = jax.random.split(jax.random.key(seed))
        images = jax.random.uniform(image_key, (batch, 1, 28, 28), dtype)
        return nnx.state(_lenet(None, dtype)), images, jax.random.randint(label_key, (batch,), 0, 10)

    batches = (128, 1024, 8192, 65536), (128,)
    title = "lenet training step"
    return Work("lenet", "", title, {}, batches, function, draw, training, steps=10)


def _lenet(implementation: str | None, dtype: str) -> LeNet:
    return LeNet(implementation=implementation, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def logic_work(name: str, gates: int, batches_elsewhere: tuple[int, ...]) -> Work:
    """The same of a logic network of six layers, as published for MNIST."""

    @functools.cache
    def parts(implementation, dtype):
        with jax.ensure_compile_time_eval():
            return nnx.split(logic_network(gates, implementation, dtype), nnx.Param, ...)

    def function(implementation, dtype):
        graph, _, wires = parts(implementation, dtype)

        def loss(logits, bits, labels):
            scores = nnx.merge(graph, logits, wires)(bits).astype(jnp.promote_types(bits.dtype, jnp.float32))
            return jaxbp.softmax_cross_entropy(scores, labels, implementation=implementation).mean()

        return jax.value_and_grad(loss)

    def draw(seed, batch, dtype):
        bits_key, label_key = jax.random.split(jax.random.key(seed))
        bits = jax.random.bernoulli(bits_key, 0.5, (batch, 784)).astype(dtype)
        return parts(None, dtype)[1], bits, jax.random.randint(label_key, (batch,), 0, 10)

    place = f"6x{gates}"
    chain = functools.partial(training, optimiser=optax.adam(0.01))
    title = f"logic training step {place}"
    options = {"gates": gates}
    return Work(name, place, title, options, ((128, 1024), batches_elsewhere), function, draw, chain, steps=10)


def logic_network(gates: int, implementation: str | None = None, dtype: str = "float32") -> LogicNetwork:
    options = dict(tau=math.sqrt(gates / 80), initialization="normal", rngs=nnx.Rngs(0))
    return LogicNetwork(784, [gates] * 6, 10, implementation=implementation, dtype=jnp.dtype(dtype), **options)


def training(function: Callable, calls: int, optimiser: optax.GradientTransformation | None = None) -> Callable:
    """A program of training steps (forward, backward, update), by default with SGD."""
    optimiser = optimiser or optax.sgd(0.01)

    def program(sets):
        ((state, images, labels),) = sets

        def step(carry, _):
            # Ties the images to the step: nothing of them, say their transpose, is computed once for all steps.
            x, y, (state, optimiser_state) = lax.optimization_barrier((images, labels, carry))
            loss, gradients = function(state, x, y)
            updates, optimiser_state = optimiser.update(gradients, optimiser_state)
            return (optax.apply_updates(state, updates), optimiser_state), loss

        return lax.scan(step, (state, optimiser.init(state)), length=calls)

    return program


# ---------------------------------------------------------------------------------------------------------------- peers

PEERS = {
    "PyTorch": "experiments.bench.peers.torch",
    "Liger-Kernel": "experiments.bench.peers.liger",
    "QuACK": "experiments.bench.peers.quack",
    "tokamax": "experiments.bench.peers.tokamax",
    "torchlogix": "experiments.bench.peers.torchlogix",
}
"""Name -> module that times another library: its `VERSION`, and `variants(task)`, the ways in which it does a task."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a peer is asked to do.

    Attributes:
      op, options: of the table of ops; "lenet", "logic" and "logic-large" are training steps.
      sets: arguments of each call, as the op's function here takes them; for steps of training one set.
      small: arguments for the results that are compared with float64.
      calls: in a program.
      dtype: of the computation.
      products: whether there are matrix products or convolutions, so that TF32 makes a difference.
      seconds: least time of a round.
    """

    op: str
    options: Mapping[str, Any]
    sets: Sequence[tuple]
    small: tuple
    calls: int
    dtype: str
    products: bool
    seconds: float


Variant = tuple[str, str | None, Callable[[], dict[str, Any]]]
"""A way in which a peer does a task: its name, its precision if that is its own, and a function that measures it.

The function returns the fields of MEASURED that it knows, and `results`: the floating results from the small arguments,
in the order of the function here, or None.
"""


def installed_peers() -> dict[str, ModuleType]:
    """The peers' modules. Importing one imports its library."""
    peers = {}
    for name, module in PEERS.items():
        try:
            peers[name] = importlib.import_module(module)
        except Exception as error:  # a broken installation can raise anything
            print(f"{name} is left out: {error}")
    return peers


# ------------------------------------------------------------------------------------------------------------ the floor


def ceilings(dtype: str, on_gpu: bool, seconds: float) -> dict[str, Any]:
    """The rates of this device: a copy's bytes, read and written, and a matrix product's operations by precision."""
    x = jax.random.normal(jax.random.key(0), (2**26 if on_gpu else 2**24,))
    copy, _ = device_seconds(jax.jit(jnp.negative), (x,), seconds, ROUNDS)
    size = 8192 if on_gpu else 1024
    a, b = jax.random.normal(jax.random.key(1), (2, size, size), dtype)
    rates = {}
    for precision in ("default", "highest"):
        product, _ = device_seconds(
            jax.jit(functools.partial(jnp.matmul, precision=precision)), (a, b), seconds, ROUNDS
        )
        rates[precision] = 2 * size**3 / product
    return {"copy_bytes_per_second": 2 * x.nbytes / copy, "operations_per_second": rates}


def floor_seconds(bytes_moved: int, operations: int, precision: str, rates: Mapping[str, Any]) -> float:
    """The least time for so many bytes and operations."""
    return max(bytes_moved / rates["copy_bytes_per_second"], operations / rates["operations_per_second"][precision])


def cost(work: Work, batch: int, dtype: str) -> tuple[int, int, int]:
    """(bytes of the arguments, bytes of the results, operations in products and convolutions) of one call."""
    arguments = jax.eval_shape(lambda: work.draw(0, batch, dtype))
    function = work.function("autodiff", dtype)
    return _bytes(arguments), _bytes(jax.eval_shape(function, *arguments)), operations(function, *arguments)


def operations(function: Callable, *arguments: Any) -> int:
    """The multiplications and additions in the matrix products and convolutions that the results depend on."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _operations(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _operations(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            x = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(x[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += 2 * _products_of_convolution(equation)
        else:
            times = equation.params.get("length", 1)  # of a scan
            total += times * sum(map(_operations, jaxprs_in_params(equation.params)))
    return total


def _products_of_convolution(equation: Any) -> int:
    """How many elements of the input meet one of a filter, not counting padding nor holes."""
    (x, w), y, p = (v.aval.shape for v in equation.invars), equation.outvars[0].aval.shape, equation.params
    (n, _, *in_axes), (k, c, *w_axes), (_, _, *out_axes) = p["dimension_numbers"]
    products = x[n] // p["batch_group_count"] * w[k] * w[c]
    axes = zip(in_axes, w_axes, out_axes, strict=True)
    options = (p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"])
    for (i, f, o), stride, (before, _), spread, dilation in zip(axes, *options, strict=True):
        position = np.arange(y[o])[:, None] * stride + np.arange(w[f]) * dilation - before
        inside = (position >= 0) & (position <= (x[i] - 1) * spread) & (position % spread == 0)
        products *= int(inside.sum())
    return products


# -------------------------------------------------------------------------------------------------------- measurement

MEASURED = ("microseconds", "host_waited", "temporary_bytes", "compile_seconds", "error", "failed")


def rows(
    work: Work,
    batch: int,
    implementations: Sequence[str],
    peers: Mapping[str, ModuleType],
    config: BenchConfig,
    rates: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """A row for each implementation, and for each variant of a peer."""
    dtype = config.dtype
    argument_bytes, result_bytes, in_products = cost(work, batch, dtype)
    floor = functools.partial(floor_seconds, argument_bytes + result_bytes, in_products, rates=rates)
    calls = work.steps or 1
    if work.steps is None and rates["platform"] != "cpu":
        enough = max(PROGRAM_SECONDS / floor(config.precision), CACHE_BYTES / argument_bytes)
        calls = min(MOST_CALLS, math.ceil(enough))
    draw = jax.jit(lambda seed: work.draw(seed, batch, dtype))
    arguments = jax.block_until_ready(tuple(draw(seed) for seed in range(1 if work.steps else calls)))
    error_batch = min(batch, ERROR_BATCH)
    small, reference = reference_of(work, error_batch, dtype)

    def ours(name):
        function = work.function(_implementation(name), dtype)
        one_call = compile_call(function, arguments[0])
        timed = time_chain(work.chain(function, calls), arguments, calls, config.seconds)
        return timed | one_call | {"results": results_of(work, name, error_batch, dtype)}

    runs = [(name, None, config.precision, functools.partial(ours, name)) for name in implementations]
    task = Task(work.op, work.options, arguments, small, calls, dtype, in_products > 0, config.seconds)
    for peer, adapter in peers.items():
        for name, precision, run in adapter.variants(task):
            runs.append((f"{peer} {name}", peer, precision or config.precision, run))

    result = []
    for name, peer, precision, run in runs:
        print(f"{work.title}, batch {batch}, {name}", file=sys.stderr, flush=True)
        row = {
            "work": work.title,
            "op": work.op,
            "place": work.place,
            "batch": batch,
            "dtype": dtype,
            "implementation": name,
            "peer": peer,
            "precision": precision,
            "calls": calls,
            "argument_bytes": argument_bytes,
            "result_bytes": result_bytes,
            "operations": in_products,
            "floor_microseconds": floor(precision) * 1e6,
            "error_batch": error_batch,
            **attempt(run, reference),
        }
        result.append(row | {"floor_fraction": _ratio(row["floor_microseconds"], row["microseconds"])})
    autodiff = next((row["microseconds"] for row in result if row["implementation"] == "autodiff"), None)
    return [row | {"speedup_over_autodiff": _ratio(autodiff, row["microseconds"])} for row in result]


def attempt(run: Callable[[], dict[str, Any]], reference: Sequence[np.ndarray]) -> dict[str, Any]:
    """What `run` measured, with its results' error in their place. If it fails, why: the other rows still count."""
    try:
        measured = dict.fromkeys(MEASURED) | run()
        results = measured.pop("results")
        return measured | {"error": None if results is None else relative_error(results, reference)}
    except Exception as error:
        return dict.fromkeys(MEASURED) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def compile_call(function: Callable, arguments: tuple) -> dict[str, Any]:
    """How long one call takes to compile, and what it takes of memory beyond arguments and results."""
    compiled, seconds = compile_program(function, arguments)
    return {"compile_seconds": seconds, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def time_chain(program: Callable, arguments: tuple, calls: int, seconds: float) -> dict[str, Any]:
    """The device time of one of the program's calls."""
    compiled, _ = compile_program(program, (arguments,))
    program_seconds, host_waited = device_seconds(compiled, (arguments,), seconds, ROUNDS)
    return {"microseconds": program_seconds / calls * 1e6, "host_waited": host_waited}


@functools.lru_cache(maxsize=8)
def results_of(work: Work, name: str, batch: int, dtype: str) -> list[np.ndarray]:
    """The results of an implementation at the small batch."""
    function, (small, _) = work.function(_implementation(name), dtype), reference_of(work, batch, dtype)
    return floats(jax.jit(function)(*small))


@functools.lru_cache(maxsize=2)
def reference_of(work: Work, batch: int, dtype: str) -> tuple[tuple, list[np.ndarray]]:
    """(arguments, their results) with the results in float64: JAX's own differentiation, on the CPU."""
    small = jax.jit(lambda: work.draw(0, batch, dtype))()
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64 if _is_float(a) else a.dtype)), small)
        return small, floats(jax.jit(work.function("autodiff", "float64"))(*wide))


def relative_error(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """The largest ‖a - reference‖ / ‖reference‖ of any result."""
    errors = [
        float(np.linalg.norm(a - r) / max(np.linalg.norm(r), 1e-300)) for a, r in zip(results, reference, strict=True)
    ]
    if not all(map(math.isfinite, errors)):
        raise ArithmeticError("a result is not finite where float64 is")
    return max(errors)


def _implementation(name: str) -> str | None:
    return None if name == "None" else name


def _is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def floats(tree: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree) if _is_float(a)]


def _bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


if __name__ == "__main__":
    sys.exit(main())

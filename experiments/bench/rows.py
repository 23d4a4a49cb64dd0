"""Measure the rows of the bench's report.

A workload at one batch size has one row per implementation ("pallas" only if a kernel of jaxbp runs), per baseline, and
per peer variant. A baseline is another formulation in plain JAX. A peer is another library, whose variants are ways to
compute the workload.

No program compiles while another is timed, because compilers use the host's cores, and XLA tries algorithms on the GPU.
"""

import collections
import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments.bench.measure import ONE_GRAPH, Accuracy, Compiler, attempt, error_of, time_compiled
from experiments.bench.peers import Task, VariantChoice, is_asked_for
from experiments.bench.roofline import Cost, cost, has_launch, nominal_operations, roofline_seconds
from experiments.bench.workloads import Workload, implementation
from jaxbp.verify.timing import compile_program

Row = dict[str, Any]

PROGRAM_SECONDS, MOST_CALLS = 300e-6, 32
"""On a GPU, an op's timed program takes at least `PROGRAM_SECONDS`, ten times as long as a dispatch, or makes
`MOST_CALLS` calls."""
CACHE_BYTES = 128 * 2**20
"""The arguments of all calls together have at least this size, over twice an H200's L2 cache."""

MOST_ROWS, COMPILING_SECONDS = 24, 8.0
"""Rows are compiled in groups, and a group is timed before the next is compiled. The first group is one row. Each next
group has as many rows as should take `COMPILING_SECONDS`, at most `MOST_ROWS`, because executables take memory."""


class Settings(NamedTuple):
    """The settings of a `Case`.

    Attributes:
      peers: the modules that time other libraries, by name.
      seconds: the least time per timing round.
      rates: the result of `roofline.measured_rates`, or an empty dict on a CPU.
      times_only: whether to skip memory and errors, which need further programs.
      label: a suffix for the workload's title: the dtype and precision, if the run has several.
      bursts: whether to time rows in bursts, too.
      one_graph: whether XLA puts all training steps of a timed program in one CUDA graph.
    """

    implementations: Sequence[str]
    peers: Mapping[str, Any]
    variants: VariantChoice
    dtype: str
    precision: str
    seconds: float
    compile_seconds: bool
    rates: Mapping[str, Any]
    times_only: bool = False
    label: str = ""
    bursts: bool = False
    one_graph: bool = False


class Case:
    """A workload at one batch size in one dtype and precision."""

    def __init__(self, workload: Workload, batch: int, settings: Settings):
        self.workload, self.batch, self.settings = workload, batch, settings
        self.name = _title(workload, batch) + settings.label
        self.title = f"{self.name}, batch {batch}"
        # The baseline of a language model is Flax, which is a peer.
        has_baselines = "autodiff" in settings.implementations or (settings.peers and workload.tokens is not None)
        baselines = workload.baselines if has_baselines else ()
        self.names = [*settings.implementations, *baselines]
        self._programs, self._compiled, self._drawing = {}, {}, None

    def row_names(self) -> list[str]:
        return self.names + [name for name, *_ in self._variants(self._task((), ()))]

    @property
    def has_float32_products(self) -> bool:
        return self.settings.dtype == "float32" and self.cost.operations > 0

    @functools.cached_property
    def cost(self) -> Cost:
        return cost(self.workload, self.batch, self.settings.dtype)

    @functools.cached_property
    def calls(self) -> int:
        if self.workload.steps is not None:
            return self.workload.steps
        if not self.settings.rates:
            return 1
        slowest = self._roofline_seconds(self.settings.precision, CACHE_BYTES)
        return min(MOST_CALLS, math.ceil(max(PROGRAM_SECONDS / slowest, CACHE_BYTES / self.cost.argument_bytes)))

    @property
    def _sets(self) -> int:
        return 1 if self.workload.steps else self.calls

    def _roofline_seconds(self, precision: str, working_set: int | None = None) -> float:
        if working_set is None:
            working_set = self._sets * (self.cost.argument_bytes + self.cost.result_bytes)
        return roofline_seconds(self.cost, working_set, precision, self.settings.rates)

    def submit(self, name: str, compiler: Compiler) -> bool:
        """Submit the timed program of row `name`, an implementation or a baseline, to the compiler. Return False if the
        workload has no such row."""
        print(f"{self.title}, {name}: compiling", file=sys.stderr, flush=True)
        function = self.workload.named(name, self.settings.dtype)
        if name == "pallas" and not self._launches(function):
            print(f"{self.title}, pallas: left out, because no jaxbp kernel runs", file=sys.stderr, flush=True)
            self.names.remove(name)
            return False
        if self.settings.compile_seconds:
            compiler.wait()
            # If the compilation fails, the row will fail in the same way.
            with contextlib.suppress(Exception):
                self._compiled[name] = compile_program(function, self._structs)
        update = "autodiff" if name in self.workload.baselines else implementation(name)
        chain = self.workload.chain(function, self.calls, update)
        options = ONE_GRAPH if self.settings.one_graph else None
        arguments = (self._structs,) * self._sets
        self._programs[name, "chain"] = compiler.submit(chain, arguments, timed=True, options=options)
        return True

    def submit_others(self, name: str, compiler: Compiler, accuracy: Accuracy | None) -> None:
        """Submit the programs of row `name` for memory and errors, and the program that draws the arguments."""
        self.accuracy = accuracy
        if name not in self._compiled and not self.settings.times_only:
            function = self.workload.named(name, self.settings.dtype)
            self._programs[name, "call"] = compiler.submit(function, *self._structs)
        if self.accuracy is not None:
            self.accuracy.submit(name)
        if self._drawing is None and self.workload.tokens is None:  # the program of a large model would be long
            self._drawing = compiler.submit(self._draw, 0)

    def _launches(self, function):
        try:
            return has_launch(jax.jit(function).trace(*self._structs).jaxpr.jaxpr)
        except Exception:
            return True  # the row will record why the function fails

    @functools.cached_property
    def _structs(self):
        return jax.eval_shape(self._draw, 0)

    def _draw(self, seed):
        return self.workload.draw(seed, self.batch, self.settings.dtype)

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of the implementations and baselines `names`, whose programs are compiled."""
        arguments = self._arguments()
        for name in names:
            yield self._measured(name, None, self.settings.precision, functools.partial(self._ours, name, arguments))

    def peer_rows(self, accuracy: Accuracy | None, keep_going: Callable[[], bool]) -> Iterator[Row]:
        self.accuracy = accuracy
        task = self._task(self._arguments(), () if accuracy is None else accuracy.arguments)
        for name, peer, precision, run in self._variants(task):
            if not keep_going():
                return
            print(f"{self.title}, {name}: compiling", file=sys.stderr, flush=True)
            yield self._measured(name, peer, precision, functools.partial(self._theirs, run))

    def _arguments(self):
        draw = self._draw if self._drawing is None else self._drawing.result()
        return jax.block_until_ready(tuple(map(draw, range(self._sets))))

    def _measured(self, name, peer, precision, run) -> Row:
        with jax.default_matmul_precision(self.settings.precision):
            row = self._row(name, peer, precision, attempt(run))
        figure = row["failed"] or f"{row['microseconds']:,.1f} µs"
        print(f"{self.title}, {name}: {figure}", file=sys.stderr, flush=True)
        return row

    def _row(self, name, peer, precision, measured) -> Row:
        microseconds = measured["microseconds"]
        roofline = self._roofline_seconds(precision) * 1e6 if self.settings.rates else None
        return {
            "work": self.name,
            "op": self.workload.op,
            "place": self.workload.place,
            "batch": self.batch,
            "dtype": self.settings.dtype,
            "implementation": name,
            "peer": peer,
            "precision": precision,
            "calls": self.calls,
            **self.cost._asdict(),
            "floor_microseconds": roofline,
            "error_batch": None if self.accuracy is None else self.accuracy.batch,
            **measured,
            "floor_fraction": ratio(roofline, microseconds),
            **({} if self.workload.tokens is None else self._token_rates(microseconds)),
            **({} if self.workload.share_of_tiles is None else {"share_of_tiles": self.workload.share_of_tiles}),
        }

    def _token_rates(self, microseconds: float | None) -> Row:
        tokens = ratio(self.batch * self.workload.tokens * 1e6, microseconds)
        operations = ratio(self.cost.operations * 1e6, microseconds)
        utilization = ratio(operations, nominal_operations(self.settings.dtype))
        return {"tokens_per_second": tokens, "model_flop_utilization": utilization}

    def _ours(self, name, arguments):
        compiled, compile_seconds = self._compiled.pop(name, (None, None))
        chain = self._programs.pop((name, "chain")).result()
        settings = self.settings
        how = settings.seconds, settings.times_only, settings.bursts
        measured = time_compiled(chain, arguments, self.calls, *how)
        measured["compile_seconds"] = compile_seconds
        if settings.times_only:
            return measured
        if compiled is None:
            compiled = self._programs.pop((name, "call")).result()
        measured["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        if self.workload.steps is not None:
            memory = chain.memory_analysis()  # the results are the parameters and the state of the optimizer
            measured["peak_bytes"] = memory.output_size_in_bytes + memory.temp_size_in_bytes
        return measured | ({} if self.accuracy is None else self.accuracy.error(name))

    def _task(self, sets, small) -> Task:
        config, products = self.settings, bool(self.settings.peers) and self.cost.operations > 0
        rest = (config.dtype, config.precision, products, config.seconds, config.variants, self.workload.forward)
        rest = *rest, config.bursts
        return Task(self.workload.op, self.workload.options, sets, small, self.calls if sets else 0, *rest)

    def _variants(self, task):
        for peer, adapter in self.settings.peers.items():
            for name, precision, run in adapter.variants(task):
                if not is_asked_for(peer, name, self.settings.variants):
                    continue
                yield f"{peer} {name}", peer, precision or self.settings.precision, run

    def _theirs(self, run):
        measured = run()
        results, reference = measured.pop("results", None), measured.pop("reference", None)
        if results is not None:
            reference = self.accuracy.reference if reference is None else reference
            measured |= error_of(results, reference)
        return measured


def _title(workload, batch):
    # The size of most norms and products begins with the default batch size, but attention's with the length.
    default = next(iter(workload.batches[0]), batch)
    if workload.share_of_tiles is not None:
        return workload.title
    return workload.title.replace(f" {default}x", f" {batch}x")


def measured_rows(cases: Sequence[Case], keep_going: Callable[[], bool]) -> Iterator[Row]:
    """Yield our rows of all cases, and then the rows of peers. Compile no further row after `keep_going()` is false."""
    models = [case for case in cases if case.workload.tokens is not None]
    others = [case for case in cases if case.workload.tokens is None]
    with Compiler(any(case.settings.times_only for case in cases)) as compiler:
        accuracy = functools.cache(lambda workload, batch, dtype, _: Accuracy(workload, batch, dtype, compiler))

        def accuracy_of(case):
            settings, most = case.settings, case.workload.error_batch
            if settings.times_only or most is None:
                return None
            return accuracy(case.workload, min(case.batch, most), settings.dtype, settings.precision)

        yield from _our_rows(others, compiler, accuracy_of, keep_going)
        yield from _peer_rows(others, accuracy_of, keep_going)
        # JAX keeps the memory of a language model's programs, but PyTorch returns it.
        yield from _peer_rows(models, accuracy_of, keep_going)
        yield from _our_rows(models, compiler, accuracy_of, keep_going)


def _our_rows(cases, compiler, accuracy_of, keep_going):
    waiting = collections.deque((case, name) for case in cases for name in case.names)
    count = 1
    while waiting and keep_going():
        compiled, started = [], time.monotonic()
        while waiting and len(compiled) < count:
            case, name = waiting.popleft()
            with jax.default_matmul_precision(case.settings.precision):
                compiled += [(case, name)] * case.submit(name, compiler)
            # Python lowers a large program for seconds.
            if not keep_going() or time.monotonic() - started > COMPILING_SECONDS:
                break
        for case, name in compiled:
            with jax.default_matmul_precision(case.settings.precision):
                case.submit_others(name, compiler, accuracy_of(case))
        compiler.wait()
        seconds = time.monotonic() - started
        for case, rows in itertools.groupby(compiled, lambda row: row[0]):
            yield from case.rows([name for _, name in rows])
        count = min(MOST_ROWS, max(1, round(len(compiled) * COMPILING_SECONDS / seconds)))


def _peer_rows(cases, accuracy_of, keep_going):
    for case in cases:
        if case.settings.peers and keep_going():
            yield from case.peer_rows(accuracy_of(case), keep_going)


def with_speedups(rows: Iterable[Row]) -> list[Row]:
    """Add to each row its speedup over the fastest autodiff or baseline of the same workload and batch size."""
    rows, autodiff = list(rows), {}
    of = lambda row: (row["work"], row["batch"])  # noqa: E731
    for row in rows:
        if row["implementation"].startswith("autodiff") and row["microseconds"] is not None:
            autodiff[of(row)] = min(row["microseconds"], autodiff.get(of(row), math.inf))
    return [row | {"speedup_over_autodiff": ratio(autodiff.get(of(row)), row["microseconds"])} for row in rows]


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b

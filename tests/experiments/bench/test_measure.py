import dataclasses
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import measure
from experiments.bench.measure import Accuracy, Compiler
from experiments.bench.rows import Case, Settings, measured_rows
from jaxbp.verify import timing


@pytest.mark.parametrize("bursts", [False, True])
def test_time_includes_the_whole_program(bursts, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def program(arguments):
        now[0] += 0.005
        return jnp.zeros(())

    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None, raising=False)
    timed = measure.time_compiled(program, (), calls=1, seconds=0.02, bursts=bursts)
    assert timed["microseconds"] == pytest.approx(5000)
    assert timed["round_microseconds"] == pytest.approx([5000] * measure.ROUNDS)
    assert timed["burst_microseconds"] == (pytest.approx(5000) if bursts else None)
    assert timed["host_waited"] == 0


def test_memory_is_that_of_one_call_and_not_of_the_chain(workload_at, monkeypatch):
    workload = workload_at("conv2d_backward_weights", "conv2")
    case = Case(workload, 2, Settings(["autodiff"], {}, "best", "float32", "default", 1e-3, False, {}))
    case.calls = 4
    one = jax.jit(workload.function("autodiff", "float32")).lower(*workload.draw(0, 2, "float32")).compile()
    with Compiler() as compiler:
        case.submit("autodiff", compiler)
        case.submit_others("autodiff", compiler, Accuracy(workload, 2, "float32", compiler))
        (row,) = case.rows(["autodiff"])
    assert row["calls"] == 4 and row["temporary_bytes"] == one.memory_analysis().temp_size_in_bytes > 0


def test_a_result_that_is_not_finite_is_a_failure():
    results, reference = [np.array([1.0, np.nan])], [np.ones(2)]
    row = measure.attempt(lambda: {"microseconds": 1.0, "error": measure.relative_error(results, reference)})
    assert row["microseconds"] is None and "not finite" in row["failed"]


def test_wrong_results_are_a_failure():
    rounded, wrong = [np.array([1.01, 2.0])], [np.array([2.0, 1.0])]
    assert measure.attempt(lambda: measure.error_of(rounded, [np.array([1.0, 2.0])]))["failed"] is None
    row = measure.attempt(lambda: {"microseconds": 1.0} | measure.error_of(wrong, [np.array([1.0, 2.0])]))
    assert row["microseconds"] is None and row["failed"].endswith("their error against float64 is 6.3e-01")


def test_a_program_that_cannot_be_compiled_fails_when_it_is_needed():
    with Compiler() as compiler:
        broken, sound = compiler.submit(lambda x: 1 / 0, 1.0), compiler.submit(lambda x: x + 1, 1.0)
        compiler.wait()
        assert sound.result()(2.0) == 3.0
        with pytest.raises(ZeroDivisionError):
            broken.result()


@pytest.mark.parametrize("quick", [False, True])
def test_timed_programs_are_compiled_one_at_a_time_before_others_unless_the_run_is_quick(quick, monkeypatch):
    events, together = [], threading.Barrier(3 if quick else 1)

    def compiled(lowered, compiler_options):
        events.append(f"{lowered.args_info[0][0].shape} begins")
        together.wait(timeout=60)
        time.sleep(0.1)
        events.append(f"{lowered.args_info[0][0].shape} ends")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 3)
    with Compiler(quick) as compiler:
        futures = [compiler.submit(lambda x: x, np.zeros(n), timed=n < 3) for n in (1, 2, 3)]
        compiler.wait()
        assert [future.result() for future in futures] == [None] * 3
    if not quick:
        assert events == [f"({n},) {event}" for n in (1, 2, 3) for event in ("begins", "ends")]


def test_one_graph_is_for_the_steps_of_each_implementation(workload_at, monkeypatch):
    given, compile = [], jax.stages.Lowered.compile
    record = lambda lowered, compiler_options: given.append(compiler_options) or compile(lowered, compiler_options)  # noqa: E731
    monkeypatch.setattr(jax.stages.Lowered, "compile", record)
    names, workload = ["xla", "autodiff"], dataclasses.replace(workload_at("linear", "fc3"), steps=2)
    for one_graph in (False, True):
        settings = Settings(names, {}, "best", "float32", "default", 1e-3, False, {}, one_graph=one_graph)
        case = Case(workload, 2, settings)
        with Compiler() as compiler:
            for name in names:
                case.submit(name, compiler)
            compiler.wait()
    assert given == [None] * 2 + [measure.ONE_GRAPH] * 2


def test_equal_programs_share_one_executable(workload_at):
    workload = workload_at("linear", "fc3")  # on a CPU, None is autodiff
    names = ["autodiff", "None", "xla"]
    case = Case(workload, 2, Settings(names, {}, "best", "float32", "default", 1e-3, False, {}))
    with Compiler() as compiler:
        for name in names:
            case.submit(name, compiler)
        autodiff, default, xla = (case._programs[name, "chain"] for name in names)
        assert autodiff is default and autodiff is not xla


def test_errors_are_held_against_float64(workload_at):
    with Compiler() as compiler:
        accuracy = Accuracy(workload_at("softmax_cross_entropy_backward", "classes"), 4, "bfloat16", compiler)
        for name in ("xla", "autodiff"):
            accuracy.submit(name)
        assert all(a.dtype == np.float64 for a in accuracy.reference)
        assert 1e-5 < accuracy.error("xla")["error"] < 1e-2


def test_a_reference_that_needs_too_much_memory_is_left_out(workload_at, monkeypatch):
    monkeypatch.setattr(measure, "MOST_REFERENCE_BYTES", -1)
    workload = workload_at("relu_backward", "relu4")
    case = Case(workload, 2, Settings(["xla"], {}, "best", "float32", "default", 1e-3, False, {}))
    (row,) = measured_rows([case], lambda: True)
    assert row["failed"] is None and row["error"] is None and "needs more than" in row["error_reason"]


def test_a_gradient_that_is_nothing_is_held_against_the_others():
    reference = [np.ones(4), np.full(4, 1e-17)]
    assert measure.relative_error([np.ones(4), np.full(4, 1e-8)], reference) == pytest.approx(1e-8)
    assert measure.relative_error([np.ones(4), np.full(4, 0.5)], reference) == pytest.approx(0.5)
    assert measure.relative_error([np.zeros(2)], [np.zeros(2)]) == 0

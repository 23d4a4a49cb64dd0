import types

import jax.numpy as jnp
import pytest

from jaxbp.verify import timing
from jaxbp.verify.timing import burst_seconds, compile_program, device_seconds, settle


def test_a_call_takes_the_median_of_the_rounds(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def program(x):
        calls.append(x)
        now[0] += 0.01 if len(calls) > 7 else 0.001
        return x

    seconds, waited, rounds = device_seconds(program, (jnp.ones(1),), seconds=0.0, rounds=3)
    assert len(calls) == 3 + 3 * 2
    assert seconds == pytest.approx(0.001) and waited == 0
    assert rounds == pytest.approx((0.001, 0.001, 0.01))


@pytest.mark.parametrize(
    ("is_ready", "platform", "waited"), [(False, "gpu", 1.0), (True, "gpu", 0.0), (True, "cpu", 1.0)]
)
def test_the_host_waits_only_for_results_that_are_not_ready(is_ready, platform, waited, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    result = types.SimpleNamespace(
        is_ready=lambda: is_ready,
        devices=lambda: [types.SimpleNamespace(platform=platform)],
        block_until_ready=lambda: now.__setitem__(0, now[0] + 0.25),
    )
    assert timing.run(lambda: [result, result], (), calls=20) == (10.0, 10.0 * waited)


def test_a_program_settles_before_the_first_round(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def program(x):
        now[0] += 0.01 if now[0] > 0.1 else 0.001
        return x

    assert device_seconds(program, (jnp.ones(1),), seconds=0.01)[0] == pytest.approx(0.001)
    now[0] = 0.0
    assert device_seconds(program, (jnp.ones(1),), seconds=0.01, settling=1.0)[0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("blocks", "most", "ran"),
    [
        ([0.3, 0.5, 0.4, 0.402, 0.4], 3.0, 4),
        ([0.3, 0.3, 0.4], 3.0, 2),
        ([0.3, 0.4, 0.3, 0.4, 0.3], 1.2, 3),  # never steady: up to the limit
        ([], 0.2, 0),
    ],
)
def test_it_settles_until_two_blocks_take_equally_long(blocks, most, ran):
    left = list(blocks)
    settle(lambda calls: left.pop(0) if calls == 1 else 0.0, once=1.0, most=most)
    assert len(blocks) - len(left) == ran


@pytest.mark.parametrize(("once", "calls"), [(0.001, 20), (0.015, 3)])
def test_a_burst_is_short_and_follows_a_rest(once, calls, monkeypatch):
    events = []
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(sleep=events.append))

    def run(count):
        events.append(f"{count} calls")
        return count * once * (2 if len(events) == 5 else 1)

    assert burst_seconds(run) == pytest.approx(once)
    assert events == ["1 calls"] * 3 + [0.3, f"{calls} calls"] * 3


def test_a_compiled_program_comes_with_its_seconds():
    program, seconds = compile_program(lambda x: x + 1, (jnp.ones(2),))
    assert program(jnp.ones(2)).tolist() == [2, 2] and seconds > 0

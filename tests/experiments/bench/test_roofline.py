import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.roofline import Cost, cost, has_launch, rate_of, roofline_seconds

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BATCH = 3
DY1, X1, W1 = BATCH * 6 * 24 * 24, BATCH * 28 * 28, 6 * 5 * 5


@pytest.mark.parametrize(
    ("op", "place", "arguments", "results", "operations"),
    [
        ("conv2d_backward_weights", "conv1", 4 * (DY1 + X1), 4 * W1, 2 * 25 * DY1),
        ("conv2d_backward_input", "conv1", 4 * (DY1 + W1), 4 * X1, 2 * 25 * DY1),
        ("conv2d_backward_bias", "conv1", 4 * DY1, 4 * 6, 0),
        ("conv2d", "conv1", 4 * (X1 + W1 + 6 + DY1), 4 * (DY1 + X1 + W1 + 6), 3 * 2 * 25 * DY1),
        ("max_pool2d_backward", "pool1", 5 * DY1 // 4, 4 * DY1, 0),
        (
            "linear_backward",
            "fc1",
            4 * (BATCH * 120 + BATCH * 256 + 120 * 256),
            4 * (BATCH * 256 + 120 * 256 + 120),
            2 * 2 * BATCH * 120 * 256,
        ),
    ],
)
def test_bytes_and_operations_are_those_counted_by_hand(workload_at, op, place, arguments, results, operations):
    assert cost(workload_at(op, place), BATCH, "float32") == (arguments, results, operations, arguments, results, 0)


def test_lenets_operations_are_those_of_its_layers(workload_at):
    layers = [24 * 24 * 6 * 25, 8 * 8 * 16 * 6 * 25, 256 * 120, 120 * 84, 84 * 10]
    assert cost(workload_at("lenet"), BATCH, "float32").operations == BATCH * 2 * (3 * sum(layers) - layers[0])


def test_what_need_not_move_is_not_counted(workload_at):
    counted = cost(workload_at("add_backward", "bias"), BATCH, "float32")
    assert counted.result_bytes > counted.written_bytes > 0
    assert counted.argument_bytes > counted.read_bytes > 0


def test_a_gradient_that_is_the_cotangent_is_not_written(workload_at):
    counted = cost(workload_at("add", "bias"), BATCH, "float32")
    assert counted.result_bytes - counted.written_bytes == BATCH * 1024 * 4


def test_what_a_nested_program_returns_unchanged_is_read(workload_at):
    workload = dataclasses.replace(
        workload_at("relu_backward", "relu1"), function=lambda *_: lambda dy, y: (jax.jit(lambda a: a)(dy) * y,)
    )
    counted = cost(workload, 1, "float32")
    assert counted.read_bytes == counted.argument_bytes


def test_a_gather_reads_only_the_rows_that_it_selects(workload_at):
    rows, classes, features = 3, 128256, 2560
    counted = cost(workload_at("embedding", "32768x128256x2560"), rows, "float32")
    tokens, selected = 4 * rows, 4 * rows * features
    assert counted.read_bytes == tokens + 2 * selected
    assert counted.written_bytes == selected + 4 * classes * features


def test_each_row_of_grouped_products_is_multiplied_once(workload_at):
    counted = cost(workload_at("grouped_linear", "4x64x96"), 8, "float32")
    assert counted.operations == 3 * 2 * 8 * 64 * 96


RATES = {
    "bytes_per_second": {"copy": [[100, 50.0], [1000, 100.0], [10000, 20.0]], "read": [[1000, 200.0], [10000, 10.0]]},
    "operations_per_second": {"default": 1000.0, "highest": 10.0},
}


def test_the_roofline_is_the_longer_of_moving_and_computing():
    small = Cost(100, 100, 500, read_bytes=100, written_bytes=100)
    assert roofline_seconds(small, 100, "default", RATES) == 2.0
    assert roofline_seconds(small, 100, "highest", RATES) == 50.0


def test_a_rate_is_the_best_of_a_working_set_as_large_or_larger():
    assert [rate_of("copy", size, RATES) for size in (1, 100, 999, 1000, 9999, 10000, 10**6)] == [100] * 5 + [20] * 2


def test_bytes_that_are_only_read_or_written_move_at_that_rate_and_no_slower_than_a_copys():
    reading = Cost(500, 100, 0, read_bytes=500, written_bytes=100)
    assert roofline_seconds(reading, 1000, "default", RATES) == 2 * 100 / 100 + 400 / 200
    assert roofline_seconds(reading, 10000, "default", RATES) == 2 * 100 / 20 + 400 / 20
    writing = Cost(100, 500, 0, read_bytes=100, written_bytes=500)
    assert roofline_seconds(writing, 1000, "default", RATES) == 2 * 100 / 100 + 400 / 100


def test_no_recorded_row_is_faster_than_its_roofline():
    fractions = {
        (path.name, row["work"], row["implementation"]): row["floor_fraction"]
        for path in RESULTS.glob("*.json")
        for row in json.loads(path.read_text()).get("rows", [])
        if row.get("floor_fraction")
    }
    assert len(fractions) > 200
    assert max(fractions.values()) <= 1.05, fractions  # run-to-run noise is about 5%


def test_a_launch_is_found_wherever_it_is(workload_at):
    def jaxpr(op, place, implementation):
        workload = workload_at(op, place)
        return jax.make_jaxpr(workload.function(implementation, "float32"))(*workload.draw(0, 2, "float32")).jaxpr

    assert has_launch(jaxpr("relu_backward", "relu4", "pallas"))
    assert has_launch(jaxpr("relu", "relu4", "pallas"))
    assert not has_launch(jaxpr("relu", "relu4", "xla"))
    assert not has_launch(jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).jaxpr)


def test_gates_take_the_time_of_true_float32():
    cost = Cost(1, 1, 0, read_bytes=1, written_bytes=1, arithmetic=300)
    rates = {"bytes_per_second": {"copy": [[1, 1e9]]}, "operations_per_second": {"default": 800, "highest": 100}}
    assert roofline_seconds(cost, 1, "default", rates) == 3


def test_scores_that_masks_exclude_are_not_counted(workload_at):
    length, window = 8192, 1024  # a query attends to its position and to 1,023 before it
    full, causal, windowed = (
        cost(workload_at("dot_product_attention", f"8192x16x128{masks}"), 1, "bfloat16").operations
        for masks in ("", " causal", " window")
    )
    assert full == 6 * 2 * 16 * length**2 * 128
    pairs = length * (length + 1) / 2
    assert causal == pytest.approx(full * pairs / length**2, rel=1e-9)
    assert windowed == pytest.approx(full * (window * length - window * (window - 1) / 2) / length**2, rel=1e-9)

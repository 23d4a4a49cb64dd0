import re

import numpy as np
import pytest
from verilog import in_icarus, needs_icarus, simulate

from jaxbp.logic.circuits.verilog import count_module, maximum_module


@needs_icarus
@pytest.mark.parametrize("registers", [None, 1, 3])
@pytest.mark.parametrize("table_inputs", [4, 6])
def test_counts_of_all_sizes_are_the_numbers_of_ones(table_inputs, registers, tmp_path):
    # With registers, the sums are the same. These sizes have every number of digits and every latency up to 130 bits.
    sizes, random = [*range(1, 67), *range(124, 131)] if registers else range(1, 131), np.random.default_rng(0)
    counts = [count_module(f"count{n}", n, registers, table_inputs) for n in sizes]
    latencies, clock = [latency for _, latency in counts], ".clock(clock), " if registers else ""
    # Byte n - 1 of y is the number of ones among the first n bits of x.
    parts = "".join(
        f"wire [{n.bit_length() - 1}:0] y{n}; count{n} c{n} ({clock}.x(x[{n - 1}:0]), .y(y{n}));"
        f"assign y[{8 * n - 1}:{8 * n - 8}] = y{n};"
        for n in sizes
    )
    ports, latency = "input wire [129:0] x, output wire [1039:0] y", f"localparam LATENCY = {max(latencies)};"
    if registers:
        ports, parts = f"input wire clock, {ports}", latency + parts
    source = "".join(source for source, _ in counts) + f"module circuit ({ports}); {parts} endmodule"
    x = random.random((60, 130)) < random.random((60, 1))
    x[0], x[-1] = False, True
    y = in_icarus(source, x, 1040, tmp_path).reshape(60, 130, 8) @ (1 << np.arange(8))
    wanted = x.cumsum(axis=1)
    for n, latency in zip(sizes, latencies, strict=True):
        late = max(latencies) - latency  # The count of a sample comes this number of cycles before LATENCY.
        assert np.array_equal(y[: len(y) - late, n - 1], wanted[late:, n - 1]), n


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8, 53])
def test_full_adders_count_ones(bits):
    random = np.random.default_rng(0)
    x = (random.random((bits, 200)) < random.random(200)).astype(int)
    x[:, 0], x[:, 1] = 0, 1
    y = simulate(count_module("count", bits, table_inputs=4)[0], x)
    assert len(y) == bits.bit_length()
    assert np.array_equal((1 << np.arange(len(y))) @ y, x.sum(axis=0))


def test_a_count_takes_one_adder_per_removed_bit():
    # Each adder of three bits removes one bit, and adders of two bits remain, at most one per bit of the count.
    adders = count_module("count", 200, table_inputs=4)[0].count("wire sum")
    assert 200 - 8 <= adders <= 200


def test_with_six_inputs_a_count_takes_about_one_table_per_removed_bit():
    for bits in range(1, 300):
        widths = re.findall(r"wire (?:\[(\d):0\] )?sum", count_module("count", bits)[0])
        tables, planes = sum(int(width or 0) + 1 for width in widths), bits.bit_length()
        assert bits - planes <= tables <= bits + 2


def test_a_counter_a_comparison_and_a_selection_of_one_of_four_are_levels():
    assert [count_module("count", 100, registers)[1] for registers in (1, 2, 9)] == [9, 5, 1]
    assert [maximum_module("maximum", classes, 7, 4, 1)[1] for classes in (1, 2, 4, 5, 10, 16)] == [0, 2, 2, 4, 4, 4]
    assert [maximum_module("maximum", classes, 7, 4, 1, 4)[1] for classes in (1, 2, 4, 5, 10, 16)] == [0, 1, 2, 3, 4, 4]


@needs_icarus
@pytest.mark.parametrize(("planes", "registers"), [(1, None), (2, 1), (3, None), (5, 3), (8, 1), (8, None)])
@pytest.mark.parametrize("classes", [1, 2, 3, 4, 6, 7, 9])
@pytest.mark.parametrize("table_inputs", [4, 6])
def test_the_label_is_the_first_maximum(table_inputs, classes, planes, registers, tmp_path):
    digits, random = max(1, (classes - 1).bit_length()), np.random.default_rng(0)
    numbers = random.integers(0, 1 << planes, (60, classes))
    numbers[:30] = numbers[:30, :1] ^ random.integers(0, 2, (30, classes))  # Most of these numbers are equal.
    bits = (numbers[:, :, None] >> np.arange(planes) & 1).reshape(60, -1)
    source, _ = maximum_module("circuit", classes, planes, digits, registers, table_inputs)
    source = re.sub(r"\bvotes\b", "x", source)
    labels = in_icarus(source, bits, digits, tmp_path, port="label") @ (1 << np.arange(digits))
    assert np.array_equal(labels, numbers.argmax(axis=1))

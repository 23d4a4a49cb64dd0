import numpy as np
import pytest
from verilog import in_icarus, needs_icarus, simulate

from jaxbp.logic.circuits.verilog import count_module, maximum_module


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8, 53])
def test_the_count_is_the_number_of_ones(bits):
    random = np.random.default_rng(0)
    x = (random.random((bits, 200)) < random.random(200)).astype(int)
    x[:, 0], x[:, 1] = 0, 1
    y = simulate(count_module("count", bits)[0], x)
    assert len(y) == bits.bit_length()
    assert np.array_equal((1 << np.arange(len(y))) @ y, x.sum(axis=0))


def test_a_count_takes_one_adder_per_removed_bit():
    # Each adder of three bits removes one bit, and adders of two bits remain, at most one per bit of the count.
    adders = count_module("count", 200)[0].count("wire sum")
    assert 200 - 8 <= adders <= 200


@needs_icarus
@pytest.mark.parametrize("classes", [1, 3, 6, 7])
def test_the_label_is_the_first_maximum(classes, tmp_path):
    planes, digits, random = 2, max(1, (classes - 1).bit_length()), np.random.default_rng(0)
    numbers = random.integers(0, 1 << planes, (40, classes))
    bits = (numbers[:, :, None] >> np.arange(planes) & 1).reshape(40, -1)
    source = maximum_module("circuit", classes, planes, digits)[0].replace("votes", "x")
    labels = in_icarus(source, bits, digits, tmp_path, port="label") @ (1 << np.arange(digits))
    assert np.array_equal(labels, numbers.argmax(axis=1))

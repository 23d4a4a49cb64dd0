import itertools

import pytest

import jaxbp
from jaxbp.logic.ops import _automaton_kernels as arrays_of

SIZES = {
    "checkerboard": (8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8]),
    "lizard": (128, 4, [8, 4, 2, 1], [512] * 8 + [256, 128]),
    "small": (3, 2, [8], [30, 15, 8, 5, 3]),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_take_rows_that_nobody_reads_any_more(sizes):
    sizes = arrays_of.sizes_of(jaxbp.Automaton.create(*sizes, True, seed=0), (1, 3, 3, sizes[0]))
    layers, rows, first_update = sizes.layers, sizes.gradients, len(sizes.perception)
    written = [range(first, first + 2 * layer.lanes) for first, layer in zip(rows.firsts, layers, strict=True)]
    sums = range(rows.kernel_sums.first, rows.kernel_sums.first + rows.kernel_sums.lanes)
    for i, layer in enumerate(layers):
        read = set(range(layer.first)).union(*written[i + 1 : i + 2])
        if i < first_update:
            read |= set(written[first_update])
        assert not read & set(written[i])
    assert not {*range(sizes.inputs.lanes), *written[0], *written[first_update]} & set(sums)
    # The outputs' gradients are stored before the first layer's rows are computed.
    outputs = range(rows.outputs.first, rows.outputs.end)
    assert not {*range(layers[-1].first), *itertools.chain(*written), *sums} & set(outputs)
    assert max(*map(max, written), max(sums), max(outputs)) < rows.count
    assert sizes.neighborhood <= sizes.zeros < sizes.inputs.lanes


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_layers_of_the_forward_take_rows_that_nobody_reads_any_more(sizes):
    sizes = arrays_of.sizes_of(jaxbp.Automaton.create(*sizes, True, seed=0), (1, 3, 3, sizes[0]))
    inputs, layers = range(sizes.inputs.lanes), sizes.forward_layers
    for before, layer in zip([sizes.inputs, *layers], layers, strict=False):
        assert not {*inputs, *range(before.first, before.end)} & set(range(layer.first, layer.end))
    assert max(layer.end for layer in layers) == sizes.forward_rows <= sizes.rows
    assert len(layers) < 4 or sizes.forward_rows < sizes.rows

import jax
import pytest

from jaxbp import Automaton, Wires


def test_the_published_checkerboard():
    automaton = Automaton.create(8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8], False, seed=0)
    assert automaton.gates == 3040
    assert automaton.update[0].inputs == 264
    assert automaton.bits == 2
    assert sorted(automaton.perception[0].a.tolist()) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert set(automaton.perception[0].b.tolist()) == {4}


def test_seeds_are_reproducible_and_differ():
    one, same, other = (Automaton.create(2, 2, [8, 4], [9, 5, 3, 2], True, seed=s) for s in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(same), strict=True))
    assert one.update[0].a.tolist() != other.update[0].a.tolist()


def test_from_wires_counts_its_kernels():
    perception = [Wires.moore(), Wires.unique(8, 4, seed=0)]
    automaton = Automaton.from_wires(perception, [Wires.random(2 + 2 * 4 * 3, 2, seed=0)], 2, periodic=True)
    assert automaton.kernels == 3
    assert automaton.periodic


MOORE, LAST = Wires.moore(), Wires.random(2 + 2 * 8, 2, seed=0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Automaton.create(0, 1, [8], [1], False, 0), "channels is 0; wants an int of at least 1"),
        (lambda: Automaton.create(2, 1, [4], [2], False, 0), r"perception_widths is \[4\]; wants a list with 8"),
        (lambda: Automaton.create(2, 1, 8, [2], False, 0), "perception_widths is 8; wants a list with 8"),
        (lambda: Automaton.create(2, 1, [8], 2, False, 0), "update_widths is 2; wants a list with 2"),
        (lambda: Automaton.create(2, 1, [8], [3], False, 0), r"update_widths is \[3\]; wants a list with 2"),
        (
            lambda: Automaton.create(2, 1, [8, 3], [2], False, 0),
            "perception_widths has a layer of 3 gates that reads 8 inputs",
        ),
        (lambda: Automaton.from_wires([], [LAST], 2, False), "perception is empty; wants at least one layer"),
        (lambda: Automaton.from_wires([LAST], [LAST], 2, False), r"perception\[0\] reads 18 inputs; wants 9, one"),
        (lambda: Automaton.from_wires([MOORE], [LAST], 3, False), r"update\[-1\] has 2 gates; wants 3"),
        (lambda: Automaton.from_wires([MOORE], [MOORE, LAST], 2, False), r"update\[1\] reads 18 inputs; wants 8"),
        (
            lambda: Automaton.from_wires([MOORE], [Wires.random(19, 2, seed=0)], 2, False),
            r"update\[0\] reads 19 inputs; wants 2 \+ k \* 16, from 2 channels and the 16 outputs of each of k >= 1",
        ),
    ],
)
def test_refuses_what_does_not_fit(make, message):
    with pytest.raises(ValueError, match=f"Automaton.*: {message}"):
        make()


def test_refuses_what_is_no_wires():
    with pytest.raises(TypeError, match=r"Automaton.from_wires: update\[0\] is a int; wants a jaxbp.Wires"):
        Automaton.from_wires([MOORE], [3], 2, False)

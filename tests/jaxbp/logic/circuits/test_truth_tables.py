import numpy as np

from jaxbp.logic.circuits.truth_tables import IDENTITY, MOST_VARIABLES, reduced, widened


def table_of(variables, wanted, function):
    """Return the table of a function of some of the variables `wanted`."""
    rows = np.arange(2 ** len(wanted))[:, None] >> np.arange(len(wanted)) & 1
    values = function(rows[:, [wanted.index(variable) for variable in variables]])
    return sum(int(value) << i for i, value in enumerate(values))


def test_a_table_of_more_variables_has_the_same_values_and_becomes_the_same_table():
    random = np.random.default_rng(0)
    for count in range(MOST_VARIABLES + 1):
        wanted = sorted(random.choice(40, count, replace=False).tolist())
        for kept in range(count + 1):
            variables = sorted(random.choice(wanted, kept, replace=False).tolist())
            bits = random.integers(0, 2, 2**kept)
            function = lambda rows, bits=bits: bits[rows @ (1 << np.arange(rows.shape[1]))]  # noqa: E731
            table = table_of(variables, variables, function)
            assert widened(table, variables, wanted) == table_of(variables, wanted, function)
            assert reduced(widened(table, variables, wanted), wanted) == reduced(table, variables)


def test_a_reduced_table_depends_on_each_of_its_variables():
    parity = table_of([1, 5], [1, 3, 5], lambda rows: rows[:, 0] ^ rows[:, 1])
    assert reduced(parity, [1, 3, 5]) == ((1, 5), 0b0110)
    assert reduced(0, [1, 3, 5]) == ((), 0) and reduced(IDENTITY, [7]) == ((7,), IDENTITY)

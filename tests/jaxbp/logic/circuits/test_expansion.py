import numpy as np

from jaxbp.logic.circuits.expansion import expanded, gates_of
from jaxbp.logic.gates import TRUTH_TABLES

ROWS = np.arange(16)[:, None] >> np.array([3, 2, 1, 0]) & 1


def table_of(function):
    return int("".join(str(int(function(*row))) for row in ROWS.tolist()), 2)


def value(expression):
    """Return what an expression computes for each row of a table."""
    if isinstance(expression, int):
        return ROWS[:, expression]
    function, a, b = expression
    return TRUTH_TABLES[function, 2 * value(a) + value(b)]


def test_expressions_compute_their_tables_with_few_gates():
    tables = np.random.default_rng(0).integers(0, 2**16, 500).tolist()
    for table in tables:
        assert int("".join(map(str, value(expanded(table)))), 2) == table
    counts = [len(gates_of(expanded(table))) for table in tables]
    assert max(counts) <= 10 and np.mean(counts) < 6


def test_tables_with_a_structure_need_no_more_gates_than_it():
    functions = {
        lambda a, b, c, d: a: 0,
        lambda a, b, c, d: True: 1,
        lambda a, b, c, d: not c: 1,
        lambda a, b, c, d: b > d: 1,
        lambda a, b, c, d: c if a else d: 3,
        lambda a, b, c, d: (a + b + c + d) % 2: 3,
        lambda a, b, c, d: (a or c) and (b == d): 3,
        lambda a, b, c, d: a + b + c >= 2: 4,
    }
    assert {f: len(gates_of(expanded(table_of(f)))) for f in functions} == functions


def test_gates_come_after_the_gates_that_they_read():
    gates = list(gates_of(expanded(0x8EF1)))
    for i, (_, *sources) in enumerate(gates):
        assert all(isinstance(source, int) or source in gates[:i] for source in sources)
    assert gates[-1] == expanded(0x8EF1)

"""C source of a function of a row of numbers, and comments that describe the inputs of a circuit."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxbp.logic.circuits.netlist import BitCircuit
from jaxbp.logic.circuits.sources import C_WORDS, check_name
from jaxbp.logic.tables import columns
from jaxbp.logic.tables.quantizer import Quantizer

_C_ROWS = string.Template(r"""
typedef struct { uint32_t feature; uint8_t kind; float value; } ${name}_condition;
static const ${name}_condition ${name}_conditions[] = {
$conditions
};

/* Whether a row fulfills a condition: a feature is above a value, equal to a value, or missing (NaN). */
static uint32_t ${name}_bit(const ${name}_condition *condition, const float *row) {
  const float x = row[condition->feature];
  return condition->kind == 0 ? x > condition->value : condition->kind == 1 ? x == condition->value : x != x;
}

/* The bits of n rows, at most 512: bit k of x[i][w] is condition i of row 32 w + k. */
static void ${name}_quantize(size_t n, const float *rows, uint32_t *x) {
  enum { words = ${circuit}_block };
  for (size_t i = 0; i < $bits * words; i++) x[i] = 0;
  for (size_t j = 0; j < n; j++)
    for (size_t i = 0; i < $bits; i++)
      x[i * words + j / 32] |= ${name}_bit(&${name}_conditions[i], rows + j * $features) << j % 32;
}
$result
/* The results of rows[n][$features]. */
void ${name}_rows(size_t n, const float *rows, $type *results) {
  enum { words = ${circuit}_block, block = 32 * words };
  ${circuit}_static uint32_t x[($bits + $outputs) * words];
  for (size_t first = 0; first < n; first += block) {
    const size_t count = n - first < block ? n - first : block;
    ${name}_quantize(count, rows + first * $features, x);
    ${name}_results(count, x, results + first);
  }
}

/* The result of row[$features]. */
$type $name(const float *row) {
  $type result;
  ${name}_rows(1, row, &result);
  return result;
}
""")

_C_CLASS = string.Template(r"""
static void ${name}_results(size_t n, const uint32_t *x, int *results) {
  int classes[32 * ${circuit}_block];
  ${circuit}_classify_words(${circuit}_block, x, classes);
  for (size_t j = 0; j < n; j++) results[j] = classes[j];
}
""")

_C_VALUE = string.Template(r"""
/* The prediction for each number of outputs that are on. */
static const float ${name}_values[] = {$values};

static void ${name}_results(size_t n, uint32_t *x, float *results) {
  enum { words = ${circuit}_block };
  uint32_t *const y = x + $bits * words;
  ${circuit}(words, x, y);
  for (size_t j = 0; j < n; j++) {
    size_t on = 0;
    for (size_t i = 0; i < $outputs; i++) on += y[i * words + j / 32] >> j % 32 & 1;
    results[j] = ${name}_values[on];
  }
}
""")


def c_source(
    op: str,
    name: str,
    quantizer: Quantizer,
    circuit: BitCircuit,
    features: int,
    described: Sequence[str],
    classes: Sequence[Any] | None,
    values: Float32[np.ndarray, " counts"] | None = None,
    circuit_name: str | None = None,
) -> str:
    """Return C99 source of functions that evaluate a circuit for rows of numbers.

    Without `values`, `int name(const float *row)` returns the index of a class. With `values`,
    `float name(const float *row)` returns `values[number of outputs that are on]`. `{name}_rows` computes n rows. A
    third function evaluates the circuit. It is named `circuit_name`, by default `{name}_circuit`.

    Args:
      op: the name that error messages begin with.
      quantizer: converts a row to the bits that the circuit reads.
      features: how many numbers a row has.
      described: lines that describe these numbers, for a comment.
      classes: the classes, for a comment. None with `values`.
    """
    circuit_name = circuit_name or f"{name}_circuit"
    check_name(op, name, C_WORDS)
    check_name(op, circuit_name, C_WORDS)
    conditions = zip(quantizer.features, quantizer.kinds, map(c_float, quantizer.values.tolist()), strict=True)
    outputs = 0 if values is None else circuit.outputs
    shared = dict(name=name, circuit=circuit_name, bits=len(quantizer), outputs=outputs)
    if values is None:
        result = _C_CLASS.substitute(shared)
    else:
        result = _C_VALUE.substitute(shared, values=", ".join(map(c_float, values.tolist())))
    rows = _C_ROWS.substitute(
        shared,
        conditions=",\n".join(f"  {{{feature}, {kind}, {value}}}" for feature, kind, value in conditions),
        features=features,
        type="int" if values is None else "float",
        result=result,
    )
    lines = [] if classes is None else [f"The classes are {columns.coded(classes)}."]
    return comment([*described, *lines]) + circuit.to_c(circuit_name, None if classes is None else len(classes)) + rows


def circuit_comment(
    quantizer: Quantizer, names: Sequence[Any], categories: Mapping[int, Sequence], outputs: int, groups: int
) -> str:
    """Return lines that describe a circuit's inputs and groups of outputs, as a comment of C and of Verilog."""
    lines = [f"x[{i}]: {condition}" for i, condition in enumerate(quantizer.describe(names, categories))]
    group = outputs // groups
    return comment([*lines, f"Group g of the outputs is y[{group} g] to y[{group} g + {group - 1}]."])


def comment(lines: Iterable[str]) -> str:
    """Return lines that do not end with a backslash as a comment of C and of Verilog."""
    printable = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return "".join(f"// {line}\n" for line in printable)


def c_float(value: float) -> str:
    """Return a decimal literal that C reads as the same float32."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"

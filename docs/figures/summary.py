"""The summary of the benchmarks, one line per family of ops."""

from typing import NamedTuple

from figures.bench_tables import both_products
from figures.cells import WHY, commit, day, devices, floor, link, markdown, microseconds, times
from figures.measurements import Reports, Row, all_rows, autodiff, best_peer, library, load, no_file, speedup


class Family(NamedTuple):
    name: str
    page: str
    """Page in docs/benchmarks/."""
    file: str
    work: str
    """Prefix of the workload and batch in the rows."""
    why: str
    """Why jaxbp is not closer to the roofline, without figures."""

    def rows(self) -> dict[str, Row]:
        named = ((f"{row['work']}, batch {row['batch']}", row) for row in all_rows(load(self.file)))
        return {row["implementation"]: row for name, row in named if name.startswith(self.work)}

    def speedups(self) -> tuple[float | None, float | None]:
        rows = self.rows()
        return speedup(library(rows), autodiff(rows)), speedup(library(rows), best_peer(rows))


FAMILIES = (
    Family("LeNet training step, batch 128", "lenet", "lenet", "lenet training step, batch 128",
           "Each kernel takes longer to launch than to run."),
    Family("LeNet training step, batch 8192", "lenet", "lenet", "lenet training step, batch 8192",
           "Threads rearrange operands in shared memory before the tensor cores read them."),
    Family("LeNet training step, batch 8192, exact float32", "lenet", "lenet-exact", "lenet training step, batch 8192",
           "The convolutions run on the CUDA cores."),
    Family("LayerNorm backward, 65536x1024, bfloat16", "norm", "layer_norm", "layer_norm_backward 65536x1024",
           "Warps wait for sums of rows, and registers limit the number of CTAs."),
    Family("LayerNorm backward, 32768x4096, bfloat16", "norm", "layer_norm", "layer_norm_backward 32768x4096",
           "The limits are the same as for 65536x1024."),
    Family("RMSNorm backward, 16384x4096, bfloat16", "norm", "layer_norm", "rms_norm_backward 16384x4096",
           "The limits are the same as for LayerNorm's backward."),
    Family("LayerNorm + Linear, 65536x(1024->1024), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 65536x1024x1024",
           "The matrix products drive the GPU to its power limit."),
    Family("LayerNorm + Linear, 262144x(256->256), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 262144x256x256",
           "Two warps per scheduler do not hide the latency of normalizing."),
    Family("gates, forward and backward, 4096->8192", "logic", "gates", "gate_layer fwd+bwd 4096->8192",
           "The L2 cache bounds the time. The roofline counts device memory only."),
    Family("logic network step, 6x8000, batch 128", "logic", "logic", "logic training step 6x8000, batch 128",
           "Launches count, and Adam reads and writes 16 logits per gate."),
    Family("logic network step, 6x64000, batch 128", "logic", "logic", "logic training step 6x64000, batch 128",
           "The L2 cache bounds the layers, and Adam reads and writes 16 logits per gate."),
    Family("convolutional gates, M for MNIST, batch 128", "logic", "logic-conv", "logic-conv training step mnist-m",
           "The instructions of the trees and their latency bound the time."),
    Family("automaton step, 16x16, 20 ticks, batch 2", "logic", "automaton", "automaton training step 16x16",
           "The grid has too few cells to hide the latency of shared memory."),
    Family("convolution, gradient of the weights, conv2", "conv", "backwards",
           "conv2d_backward_weights conv2 at default",
           "The kernel needs transposed images."),
    Family("convolution, gradient of the weights, conv2, exact", "conv", "backwards",
           "conv2d_backward_weights conv2 at highest",
           "The kernel needs transposed images, and runs on the CUDA cores."),
    Family("convolution, gradient of the bias, conv1", "conv", "backwards", "conv2d_backward_bias conv1",
           "The kernel needs a transpose. `None` uses XLA's sum, which needs none."),
    Family("convolution, ReLU, pool backward, block 1", "conv", "backwards",
           "conv2d_relu_max_pool2d_backward block1 at default",
           "Shared memory bounds the time."),
    Family("convolution, ReLU, pool backward, block 1, exact", "conv", "backwards",
           "conv2d_relu_max_pool2d_backward block1 at highest",
           "The CUDA cores compute the products, and the rate of instructions bounds the time."),
    Family("max-pool backward, overlapping windows", "conv", "backwards", "max_pool2d_backward overlapping",
           "The kernel needs transposes. `None` uses the formula, which needs none."),
    Family("softmax and cross-entropy backward", "dense", "backwards", "softmax_cross_entropy_backward classes",
           "The launch takes longer than the kernel. `None` uses the formula."),
    Family("ReLU backward, images", "pointwise", "backwards", "relu_backward relu1",
           "The kernel runs at the rate of a copy."),
)  # fmt: skip


def summary(reports: Reports) -> str:
    lines, measured = [], {}
    for family in FAMILIES:
        title = f"[{family.name}](benchmarks/{family.page}.md)"
        measured |= load(family.file)
        rows = family.rows()
        ours, theirs, peer = library(rows), autodiff(rows), best_peer(rows)
        if not ours:
            lines.append([title, "not measured yet", *[""] * 6, family.why])
            continue
        over_autodiff, over_peer = map(times, family.speedups())
        of_peer = f"{microseconds(peer)} ({peer['peer']})" if peer else ""
        cells = [microseconds(ours), of_autodiff(theirs), over_autodiff, of_peer, over_peer]
        lines.append([title, *cells, both_products(ours, theirs), floor(ours), family.why])
    if not measured:
        return no_file(FAMILIES[0].file)
    times_of = ["jaxbp", "autodiff", "speedup over autodiff", "best peer", "speedup over best peer"]
    head = ["workload, µs", *times_of, "products in: jaxbp / autodiff", "% of roofline", WHY]
    days = sorted(map(day, measured.values()))
    dates = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    files = ", ".join(f"{link(name)} at {commit(report)}" for name, report in sorted(measured.items()))
    sources = f"Measured on {devices(measured)}, {dates}. Files, and commits of the runs: {files}."
    return f"{markdown(head, lines)}\n\n{sources} This command repeats the commands of these files:\n\n    {REPRODUCE}"


REPRODUCE = "python -m experiments.bench --reproduce"


def of_autodiff(row: Row | None) -> str:
    if row is None:
        return ""
    formula = row["implementation"].removeprefix("autodiff").removeprefix(", ")
    return f"{microseconds(row)} ({formula})" if formula else microseconds(row)

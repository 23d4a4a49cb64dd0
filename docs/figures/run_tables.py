"""Tables of training runs, studies over seeds, profiles, checks, runs on several devices, and tested versions."""

import itertools
import json
import math
import re
import shlex
import statistics
import tomllib
from collections.abc import Callable, Sequence

from figures import measurements
from figures.cells import day, devices, link, markdown, mebibytes, number, percent
from figures.measurements import Report, Reports, Row, all_rows, grouped, time


def step(row: Row) -> str:
    return row["work"].replace(" training step", "")


def change(row: Row, field: str) -> str:
    return f"{row['changed'][field] / row['original'][field] - 1:+.0%}"


def difference(row: Row, implementation: str) -> str:
    value = row["differences"][implementation]
    return f"{value:.1e}" if value else "0"


def bits_per_byte(run: Report, method: str) -> str:
    return f"{run['compression']['bits_per_byte'][method]:.3f}"


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    # Steps of a tutorial.
    "step": ("step", lambda row: row["step"]),
    "microseconds": ("time, µs", lambda row: number(row["microseconds"])),
    "roofline": ("share of the roofline", lambda row: percent(row["roofline_share"])),
    # Training steps on several devices.
    "training_step": ("step", lambda row: f"{step(row)}, {row['examples']:,} per device"),
    "alone": ("one device, µs", lambda row: number(row["alone"])),
    "mesh_of_one": ("cost of a mesh of one", lambda row: f"{row['mesh_of_one'] / row['alone'] - 1:+.1%}"),
    "mesh": ("efficiency on {devices} devices", lambda row: f"{row['alone'] / row['mesh']:.1%}"),
    "mesh_overlapping": ("efficiency with overlap", lambda row: f"{row['alone'] / row['mesh_overlapping']:.1%}"),
    # Runs of experiments.train.
    "arguments": ("`experiments.train`", lambda run: f"[`{arguments(run)}`](results/{run['file']}.json)"),
    "test_accuracy": ("test accuracy", lambda run: f"{run['test_accuracy']:.4f}"),
    "epochs": ("epochs", lambda run: str(run["epochs"])),
    "train_seconds": ("training, s", lambda run: number(run.get("train_seconds"))),
    "evaluation_seconds": ("evaluation, s", lambda run: number(run.get("evaluation_seconds"))),
    "compile_seconds": ("compilation, s", lambda run: number(run.get("compile_seconds"))),
    "images": ("images/s", lambda run: f"{run['images_per_second']:,.0f}" if run.get("images_per_second") else ""),
    # Runs of the language model.
    "gpt": ("GPT, bits/byte", lambda run: bits_per_byte(run, "gpt")),
    "gzip": ("`gzip -9`", lambda run: bits_per_byte(run, "gzip -9")),
    "xz": ("`xz`", lambda run: bits_per_byte(run, "xz")),
    "order_4": ("order 4", lambda run: bits_per_byte(run, "order 4")),
    "steps": ("steps", lambda run: f"{run['steps']:,}"),
    "implementation": ("implementation", lambda row: f"`{row['implementation']}`"),
    "loss_difference": ("largest difference", lambda row: f"{row['difference']:.2%}"),
    "largest_size": ("rows x tokens that fit", lambda row: f"{row['batch']:,} x {row['length']:,}"),
    "peak_gib": ("peak memory, GiB", lambda row: f"{row['peak_bytes'] / 2**30:.1f}"),
    # Runs of the fuzzer. In an older run, a crash would have ended the run.
    "seed": ("run", lambda run: f"[seed {run['seed']}](results/{run['file']}.json)"),
    "device": ("device", lambda run: f"{devices({run['file']: run})}, {day(run)}"),
    "cases": ("cases", lambda run: f"{run['cases']:,}"),
    "refused": ("unsupported by a kernel", lambda run: f"{run['refused']:,}"),
    "failures": ("failed", lambda run: f"{len(run['failures']):,}"),
    "crashes": ("crashed", lambda run: f"{len(run['crashes']):,}" if "crashes" in run else ""),
    "seconds": ("seconds", lambda run: number(run["seconds"])),
    # Estimators of logic gates.
    "dataset": ("data set", lambda row: f"{row['dataset'].replace('_', ' ')}, {row['rows']:,} x {row['features']}"),
    "estimator": ("estimator", lambda row: f"`{row['estimator']}`"),
    "mean_accuracy": ("accuracy", lambda row: f"{row['accuracy']:.4f}"),
    "fit_seconds": ("fit, s", lambda row: f"{row['seconds']:.1f}"),
    "first_fit_seconds": ("first fit, s", lambda row: f"{row['first_seconds']:.1f}"),
    "gates": ("gates", lambda row: f"{row['gates']:,.0f}" if "gates" in row else ""),
    "c_kib": ("C code, KiB", lambda row: f"{row['c_bytes'] / 2**10:,.0f}" if "c_bytes" in row else ""),
    # Public programs that call jaxbp, and their cost.
    "program": (
        "program",
        lambda row: "[{program}](https://github.com/{repository}/blob/{commit}/{path})".format(**row),
    ),
    "dtype": ("dtype", lambda row: row["dtype"]),
    "replaced": ("layers and functions replaced", lambda row: str(row["replaced"])),
    "lines": (
        "lines added / removed, without imports",
        lambda row: f"{row['lines_added'] - row['imports']} / {row['lines_removed']}",
    ),
    "None": ("`None`", lambda row: difference(row, "None")),
    "xla": ('`"xla"`', lambda row: difference(row, "xla")),
    "setting": ("program", lambda row: f"{row['program']}, {row['setting']}"),
    "original_ms": ("original, ms", lambda row: f"{row['original']['milliseconds']:.1f}"),
    "changed_ms": ("changed, ms", lambda row: f"{row['changed']['milliseconds']:.1f}"),
    "ms": ("", lambda row: change(row, "milliseconds")),
    "original_gib": ("original, GiB", lambda row: f"{row['original']['peak_bytes'] / 2**30:.2f}"),
    "changed_gib": ("changed, GiB", lambda row: f"{row['changed']['peak_bytes'] / 2**30:.2f}"),
    "gib": ("", lambda row: change(row, "peak_bytes")),
    # Circuits on programmable chips.
    "chip": ("`--device`", lambda run: f"[`{run['device_option']}`](results/{run['file']}.json), {run['chip']}"),
    "network": ("layers x gates, inputs per gate", lambda run: network(run.get("settings"))),
    "gate_count": ("gates when simplified", lambda run: f"{run['gate_count']:,}"),
    "levels": ("`--registers`", lambda run: str(run["levels_per_register"] or "none")),
    "gate_tables": ("tables of {table_inputs} inputs, gates", lambda run: f"{run['gates']['tables']:,}"),
    "vote_tables": ("tables of {table_inputs} inputs, votes", lambda run: f"{run['votes']['tables']:,}"),
    "circuit_depth": ("depth in tables", lambda run: str(run["circuit"]["depth"])),
    "registers": ("registers", lambda run: f"{run['circuit']['registers']:,}"),
    "cycles": ("clock cycles", lambda run: str(run["latency_cycles"] or 1)),
    "megahertz": ("MHz", lambda run: f"{run['megahertz']:.1f}" if "megahertz" in run else ""),
    "nanoseconds": ("latency, ns", lambda run: f"{run['latency_nanoseconds']:.0f}" if "megahertz" in run else ""),
    "vector_bits": ("bits per vector register", lambda row: str(row["vector_bits"])),
    "samples_per_second": ("samples/s", lambda row: f"{row['samples_per_second']:,.0f}"),
}
"""Columns that pages name: the heading, with fields of the run, and a function from a row or a run to the cell."""


def rows(reports: Reports, columns: str) -> str:
    """Return a table with one line per row, or per run without rows, and with `columns`, keys of `COLUMNS`."""
    found = [{**row, "file": name} for name, report in reports.items() for row in (report.get("rows") or [report])]
    shown = [COLUMNS[column] for column in columns.split(",")]
    fields = next(iter(reports.values()))
    table = markdown(
        [heading.format(**fields) for heading, _ in shown], [[cell(row) for _, cell in shown] for row in found]
    )
    return "\n\n".join(filter(None, [table, sizes(reports)]))


def training(reports: Reports, experiment: str, columns: str) -> str:
    runs = {name: run for name, run in reports.items() if f"experiments.train {experiment}" in run["command"]}
    if not runs:
        return f"*Not measured yet: {', '.join(map(link, reports))} train other experiments.*"
    note = f"Each row is one run ({devices(runs)}). Training excludes evaluation and compilation."
    return f"{rows(runs, columns)}\n\n{note}"


def network(settings: Row | None) -> str:
    # Results from before the settings were kept have none.
    return "{layers} x {gates:,}, {arity}".format(**settings) if settings else ""


def arguments(run: Report) -> str:
    return re.sub(r"^.*experiments\.train | ?--(?:json|data-dir|run-dir)[ =]\S+", "", run["command"])


def programs(reports: Reports, columns: str) -> str:
    where = f"Measured on {devices(reports)}, {', '.join(map(day, reports.values()))}."
    sources = (f"{link(name)}: {report['note']}" for name, report in reports.items())
    return f"{rows(reports, columns)}\n\n{' '.join([where, *sources])}"


def seeds(reports: Reports) -> str:
    of_settings: dict[str, list[Row]] = {}
    for report in reports.values():
        recipes = list(report.get("recipes", ()))
        runs = [row for row in report["rows"] if not row.get("failed")]
        runs.sort(key=lambda row, recipes=recipes: recipes.index(row["recipe"]) if recipes else 0)
        for row in runs:
            of_settings.setdefault(setting(report, row), []).append(row)
    lines = {title: over_seeds(rows) for title, rows in of_settings.items()}
    head = next(iter(lines.values()), ())
    return markdown(["settings", *head], [[title, *cells.values()] for title, cells in lines.items()])


def gates(reports: Reports) -> str:
    found: dict[int, dict[str, list[float]]] = {}
    for row in all_rows(reports):
        words = shlex.split(row["settings"])
        options = dict(itertools.pairwise(words))
        wires = "learned" if options["--wiring"] == "learned" else "fixed"
        kind = f"{wires} wires, {options.get('--arity', 2)} inputs"
        of_size = found.setdefault(int(options["--gates"]) * int(options["--layers"]), {})
        of_size.setdefault(kind, []).extend([row["test_accuracy"]] if "test_accuracy" in row else [])
    kinds = sorted({kind for of_size in found.values() for kind in of_size})
    lines = [
        [f"{size:,}", *(f"{statistics.mean(values):.4f}" if (values := of_size.get(kind)) else "" for kind in kinds)]
        for size, of_size in sorted(found.items())
    ]
    files = ", ".join(map(link, reports))
    return f"{markdown(['gates', *kinds], lines)}\n\n{devices(reports)}. Files, with the commands: {files}."


def setting(report: Report, row: Row) -> str:
    """Return a run's settings as text. Older result files have them in several fields."""
    if "recipe" in row:
        return f"{report['experiment']}: {report['recipes'][row['recipe']]}"
    parts = [report.get("dataset"), *(row.get(field) for field in ("experiment", "size", "precision"))]
    settings = row.get("settings")
    parts += [f"`{settings if isinstance(settings, str) else json.dumps(settings)}`"] if settings else []
    return ", ".join(filter(None, parts))


def over_seeds(rows: Sequence[Row]) -> dict[str, str]:
    """Return one line of a table, as a dict from headings to cells. `rows` are runs with the same settings."""
    is_automaton = "right" in rows[0]
    exact = [row for row in rows if row.get("right") == 1]

    def values(field: str, rows: Sequence[Row] = rows) -> list[float]:
        return [row[field] for row in rows if row.get(field) is not None]

    def mean(field: str, digits: int = 0) -> str:
        return f"{statistics.mean(values(field)):,.{digits}f}" if values(field) else ""

    def median(field: str) -> str:
        return number(float(statistics.median(values(field, exact)))) if exact else ""

    def count(field: str) -> str:
        return str(values(field).count(1)) if values(field) else ""

    accuracies = values("hardened") or values("test_accuracy")
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return {
        "seeds": "" if is_automaton else str(len(rows)),
        "exact": f"{len(exact)} of {len(rows)}" if is_automaton else "",
        "stand": count("stands"),
        "heal": count("heals"),
        "updates until exact, median": median("updates"),
        "gates, median": median("gates"),
        "gates placed": mean("placed_gates"),
        "simplified": mean("simplified_gates"),
        "test accuracy": "" if is_automaton else f"{statistics.mean(accuracies):.4f} ± {spread:.4f}",
        "test accuracy, relaxed": mean("relaxed", 4),
        "skipped steps": number(sum(values("skipped_steps")) or None),
        "epochs": "" if is_automaton else mean("epochs"),
        "s per run": "" if is_automaton else mean("seconds"),
        "C, samples/s": mean("c_samples_per_second"),
    }


def profile(reports: Reports) -> str:
    """Show the sum of each kernel's times, and averages weighted by time. Leave out kernels that take less than
    `LEAST_SHARE` of their workload's time."""
    lines = []
    for rows in grouped(all_rows(reports), profiled).values():
        lines += profile_of(rows)
    head = ["workload", "kernel", "µs", "closest limit", "warps", "issued per cycle", "waits for, cycles"]
    return markdown(head, lines)


LEAST_SHARE = 0.1
UNITS = {"DRAM": "dram", "L2": "l2", "L1": "l1", "units": "sm", "warps": "warps"}


def profiled(row: Row) -> str:
    work = re.sub(r"(?<= )((\d+)x\S+), batch \2$", r"\1", row["work"])  # The size of a norm begins with its batch.
    dtype = "" if row["dtype"] == "float32" else f", {row['dtype']}"
    return work + dtype + ", exact" * (row.get("precision") == "highest")


def profile_of(measured: Sequence[Row]) -> list[list[str]]:
    lines: list[list[str]] = []
    for kernel, rows in grouped(measured, lambda row: row["kernel"]).items():
        total = sum(map(time, rows))
        if total < LEAST_SHARE * sum(map(time, measured)):
            continue
        shares = {
            unit: sum(row[field] * time(row) for row in rows) / total
            for unit, field in UNITS.items()
            if all(row.get(field) is not None for row in rows)
        }
        warps = shares.pop("warps")
        closest = max(shares, key=shares.get)
        longest = max(rows, key=time)
        waits = f"{longest['waits_for'].replace('_', ' ')}, {number(longest['waited_cycles'])}"
        title = "" if lines else profiled(rows[0])
        name = f"`{kernel.removesuffix('_mosaic_gpu_kernel')}`"
        limit = f"{closest}, {shares[closest]:.0f}%"
        lines.append([title, name, number(total), limit, f"{warps:.0f}%", number(longest.get("issued")), waits])
    return lines


LEAST_EXCESS = 0.9
"""An op stays out of the table of accuracies if each of its errors is a smaller part of the allowed error."""


def accuracy(reports: Reports) -> str:
    rows = all_rows(reports)
    columns = list(dict.fromkeys((row["implementation"], row["dtype"]) for row in rows))
    lines = []
    for op, of in sorted(grouped(rows, lambda row: row["op"].partition("_backward")[0]).items()):
        excesses = grouped(of, lambda row: (row["implementation"], row["dtype"]))
        if max(row["excess"] for row in of) < LEAST_EXCESS:
            continue
        worst = [max((row["excess"] for row in excesses.get(column, [])), default=None) for column in columns]
        lines.append([f"`{op}`", *map(percent, worst)])
    beyond = sum(row["excess"] > 1 for row in rows)
    count = f"{len(rows) - beyond} of {len(rows)} rows (op, dtype, implementation) are within the allowed error."
    count += f" The table has the ops that reach {percent(LEAST_EXCESS)} of the allowed error in a column."
    if any("" in line for line in lines):
        count += " Empty cells are not measured yet."
    head = ["op and its backwards", *(f'`"{implementation}"`, {dtype}' for implementation, dtype in columns)]
    return f"{count}\n\n{markdown(head, lines)}"


def frozen(reports: Reports) -> str:
    lines = []
    for implementation, rows in grouped(all_rows(reports), lambda row: row["implementation"]).items():
        adapters, every = (next(row for row in rows if row["place"] == wanted) for wanted in ("adapters", "all"))
        memory = [mebibytes(row[kind]) for kind in ("temporary_bytes", "result_bytes") for row in (adapters, every)]
        share = percent(time(adapters) / time(every))
        lines.append([f"`{implementation}`", number(time(adapters)), number(time(every)), share, *memory])
    memory = [f"{kind}, {wanted}, MiB" for kind in ("temporary memory", "results") for wanted in ("adapters", "all")]
    return markdown(["implementation", "adapters, µs", "all, µs", "adapters / all", *memory], lines)


def sizes(reports: Reports) -> str:
    """Return the sizes in the fields of studies, such as "16 rows of 128 in float32."."""
    texts = []
    for report in reports.values():
        if "shape" in report:
            rows, features = report["shape"]
            texts.append(f"{rows:,} rows of {features:,} in {report['dtype']}")
    return f"{'; '.join(texts)}." if texts else ""


PHASES = ("tracing", "lowering", "mosaic", "xla")


def compilation(reports: Reports) -> str:
    """Show the CPU seconds of each phase of compilation, the longest compilation first."""
    timed = sorted(((sum(map(row.get, PHASES)), row) for row in all_rows(reports)), key=lambda pair: -pair[0])
    lines = [
        [compiled_name(row), str(row["kernels"]), number(total)] + [number(row[phase]) for phase in PHASES]
        for total, row in timed
    ]
    head = ["first `jit`, CPU seconds", "kernels", "all", "tracing", "lowering", "Mosaic GPU, LLVM", "rest of XLA"]
    return markdown(head, lines)


def compiled_name(row: Row) -> str:
    op, is_op, _ = row["work"].partition(" fwd+bwd ")
    return f"`{op}`" if is_op else f"{row['work']}, batch {row['batch']:,}"


SAYS_NOTHING = ("failed", "timed out")


def sanitizer(reports: Reports) -> str:
    """Show each op's newest conclusive outcome per tool. Ops with equal outcomes share a line."""
    rows = all_rows(reports)
    tools = sorted({row["tool"] for row in rows})
    outcomes: dict[str, dict[str, str]] = {}
    for row in rows:
        of = outcomes.setdefault(row["op"], {})
        if of.get(row["tool"]) in (None, *SAYS_NOTHING) or row["outcome"] not in SAYS_NOTHING:
            of[row["tool"]] = row["outcome"]
    alike = grouped(sorted(outcomes), lambda op: tuple(outcomes[op].get(tool, "not run") for tool in tools))
    lines = [[", ".join(f"`{op}`" for op in ops), *of] for of, ops in alike.items()]
    return markdown(["ops and their gradients", *tools], lines)


def communication(reports: Reports) -> str:
    compiled, *measured = reports.values()
    model = summing(compiled, *measured) if measured else None
    lines = []
    for plain, overlapping in zip(compiled["rows"][::2], compiled["rows"][1::2], strict=True):
        sums = ", ".join(f"{count} {kind}" for kind, count in plain["collectives"].items())
        parts = sum(overlapping["collectives"].values())
        meanwhile = f"{parts}, during {overlapping['kernels_meanwhile']} of {overlapping['kernels']} kernels"
        time_of_sum, batch = model(plain["work"]) if model else (None, None)
        cells = [f"{plain['bytes']:,}", sums, meanwhile, number(time_of_sum), "" if batch is None else f"{batch:,}"]
        lines.append([step(plain), *cells])
    head = ["step", "bytes", "collectives", "overlapping collectives", "all-reduce over 8 devices, µs"]
    return markdown([*head, "batch for 95% efficiency"], lines)


def summing(compiled: Report, measured: Report) -> Callable[[str], tuple[float, int]]:
    """Return a function from a workload to the microseconds of its all-reduce over the devices of `compiled`, and the
    batch for 95% efficiency. docs/benchmarks/devices.md has the model."""
    sizes = {row["work"]: row["bytes"] for row in compiled["rows"]}
    rows = [row for row in measured["rows"] if row["work"] in sizes]
    longer = [row["mesh"] - row["alone"] for row in rows]
    a_byte, a_hop = statistics.linear_regression([sizes[row["work"]] for row in rows], longer)
    few, many = measured["devices"], compiled["devices"]
    hops, bytes_of_a_link = math.log2(many) / math.log2(few), (1 - 1 / many) / (1 - 1 / few)

    def model(work: str) -> tuple[float, int]:
        sum_time = a_hop * hops + a_byte * sizes[work] * bytes_of_a_link
        low, *_, high = [row for row in rows if row["work"] == work] * 2
        if low is not high:
            slope = (high["alone"] - low["alone"]) / (high["examples"] - low["examples"])
        else:
            slope = low["alone"] / low["examples"]
        fixed = low["alone"] - slope * low["examples"]
        return sum_time, many * max(1, math.ceil((19 * sum_time - fixed) / slope))

    return model


def supported(reports: Reports) -> str:
    """Return a table with one line per version of Python that CI or a run on a GPU uses."""
    root, by_ci = measurements.DOCS.parent, "by CI, with every test"
    oldest, newest = re.findall(
        r"^(?:oldest|newest)=\$\(find_python python(\S+)", (root / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE
    )
    dependencies = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (jax,) = (each.removeprefix("jax>=") for each in dependencies if each.startswith("jax>="))
    lines = [(oldest, jax, "none", by_ci), (newest, "the newest", "none", by_ci)]
    on_gpus: dict[tuple[str, str], dict[str, str]] = {}
    for name, report in reports.items():
        if report.get("platform") == "gpu":
            versions = report["versions"]
            key = versions["python"].rpartition(".")[0], versions["jax"]
            on_gpus.setdefault(key, {})[report["device"]] = name
    for key, runs in on_gpus.items():
        latest = ", ".join(map(link, sorted(runs.values())))
        lines.append((*key, " and ".join(sorted(runs)), f"by the tests marked `gpu`, and by runs such as {latest}"))
    lines.sort(key=lambda line: [int(part) for part in line[0].split(".")])
    return markdown(("Python", "JAX", "GPU", "tested"), lines, numbers=False)

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import zlib
from pathlib import Path

# JAX reads these variables when it starts. Tracebacks take a tenth of the time. With more threads, a product in the
# simulator would wait forever for threads.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["JAX_TRACEBACK_FILTERING"] = "off"
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        + " --xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion"
        + " --xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1"
    )
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # without MLIR, it compiles twice as fast
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
else:
    # One process would take most of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import HOPPER, kernels_run, targeting

HAS_GPU = kernels_run()

if jax.__version_info__ < (0, 11):  # newer versions also use a context of MLIR several times, which takes 5 ms to make
    from jax._src.interpreters import mlir

    _make_context, _programs = mlir.make_ir_context, itertools.count()
    _context_of = functools.lru_cache(maxsize=1)(lambda *_: _make_context())

    def _context():
        with contextlib.suppress(ValueError):
            if mlir.ir.Context.current:  # JAX would insert a program that is compiled within another into the other
                return _make_context()
        return _context_of(threading.get_ident(), next(_programs) // 50)

    mlir.make_ir_context = _context

# The search for cycles takes 5 to 10% of the time.
gc.freeze()
gc.set_threshold(500_000)

pytest.register_assert_rewrite("helpers")

import helpers  # noqa: E402


def _op(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    name = params.get("name")
    return params.get("family", name if name in {entry.name for entry in CATALOGUE} else "")


WITH_EACH_VERSION = re.compile(
    "jaxbp/(pairing|common|nnx/test_layer)|pallas_kernels/core/|test_(readme|rooms)|test_packaging.py(?!::test_a_type)"
    "|jaxbp/(catalogue|ops)/test_.*(cuda|lower)|test_entries.py::test_value_and_gradients_match_float64",
    re.DOTALL,
)
"""Tests of what changes most from one version of JAX to the next. They belong to each share."""

WITH_NEWEST = re.compile("simulat|older versions|before JAX|needs PyTorch|jaxbp/nnx/")
"""Names and reasons of tests that older versions may skip, and tests of layers of Flax, which changes often. These
tests belong to the last share."""

COMPILED = re.compile(
    "jaxbp/(catalogue|estimators|logic|nn|ops|training|verify)/|pallas_kernels/|tests/(clients|qa)/"
    "|experiments/(bench/|configs/|studies/|test_accuracy|test_compare|training/reports/|training/test_d)"
)
"""Tests whose time is XLA's compiler, which the oldest version runs in two thirds of the time. They belong to the first
share. A hash divides the other files, because the tests of one file share programs."""


def _share_of(path, count):
    return 1 if COMPILED.search(path) else zlib.crc32(path.encode()) % count + 1


def _in_share(item, share, count):
    name = item.nodeid.split("[")[0]
    if WITH_EACH_VERSION.search(name):
        return True
    reasons = [marker.kwargs["reason"] for marker in item.iter_markers("skipif")]
    newest = WITH_NEWEST.search(" ".join([name, *reasons]))
    return share == (count if newest else _share_of(name.split("::")[0], count))


def pytest_ignore_collect(collection_path, config):
    """Ignore a file without tests of the share, whose import takes time."""
    share = config.getoption("share")
    if not share or not collection_path.match("test_*.py"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    if share[0] == _share_of(path, share[1]):
        return None
    text = path + collection_path.read_text()
    return not (WITH_EACH_VERSION.search(text) or (share[0] == share[1] and WITH_NEWEST.search(text))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if share := config.getoption("share"):
        kept = {item for item in items if _in_share(item, *share)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=_op)
    skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0 or higher")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(skip)


MEMORY, GROWTH = 3 * 2**29, 2**29
"""A process clears the caches of its tests when it holds more bytes than `MEMORY`, and `GROWTH` bytes more than after
the last time. Otherwise, a process that always holds more than `MEMORY` would clear them after each test."""
_most_memory = MEMORY


def pytest_runtest_teardown(item, nextitem):
    global _most_memory
    on_linux = sys.platform == "linux"
    if _resident_bytes() > _most_memory if on_linux else nextitem is None or item.module is not nextitem.module:
        for value in (*vars(item.module).values(), *vars(helpers).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        jax.clear_caches()
        gc.collect()
        if on_linux:
            # The C library would keep most of the compiler's pages.
            ctypes.CDLL(None).malloc_trim(0)
            _most_memory = max(MEMORY, _resident_bytes() + GROWTH)


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PrintFailures:
    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_sep("_", f"{report.nodeid} ({report.when})", red=True)
            self.terminal.write_line(report.longreprtext)


MAY_SKIP = re.compile(
    "needs a GPU|tests the message without a GPU|needs (two|four|eight) devices"
    "|older (simulators|versions)|the kernel is not faster before JAX"
    "|needs (JAX's plugin for CUDA|ptxas|PyTorch and torchlogix):"
)


def pytest_addoption(parser):
    help = "fail on a skipped test, unless a run with a GPU or a newer JAX would not skip it"
    parser.getgroup("skips").addoption("--fail-on-skip", action="store_true", help=help)
    help = "run a share of the tests: 1/2 with the oldest, 2/2 with the newest supported version of JAX"
    parser.getgroup("shares").addoption("--share", type=lambda text: tuple(map(int, text.split("/"))), help=help)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report, share = _judge_skip((yield), item.config), item.config.getoption("share")
    skips_older = report.skipped and WITH_NEWEST.search(str(report.longrepr))
    if share and skips_older and not _in_share(item, share[1], share[1]):
        report.outcome, report.longrepr = "failed", f"no share runs {item.nodeid}; wants a name with WITH_NEWEST"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _judge_skip((yield), collector.config)


def _judge_skip(report, config):
    if report.skipped and config.getoption("fail_on_skip") and not MAY_SKIP.search(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"--fail-on-skip: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(PrintFailures(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def _exact_products():
    """Without TF32, one set of tolerances holds on every platform."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_hopper():
    with targeting(HOPPER):
        yield

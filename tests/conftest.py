import atexit
import datetime
import gc
import os
import shutil
import tempfile
import zlib

# Before JAX starts: devices to shard over, and fast compilation of the interpreted kernels, which are loops with long
# bodies and run briefly. A product that wants more threads would wait for ever for those that wait for it in the
# simulator.
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        + " --xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion"
        + " --xla_cpu_multi_thread_eigen=false"
    )
    # Nearly all of the time is compilation. The processes of pytest-xdist, which inherit this, share what they compile.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache = tempfile.mkdtemp()
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        atexit.register(shutil.rmtree, cache, ignore_errors=True)

else:
    # A process would else take most of the GPU's memory, which those of pytest-xdist share.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest
import skip_rule
from skip_rule import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401

from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import HOPPER, kernels_run, targeting

HAS_GPU = kernels_run()

# Looking for cycles as often as by default takes 5 to 10% of the time: tracing makes many objects, and few are in one.
gc.freeze()
gc.set_threshold(100_000)

pytest.register_assert_rewrite("helpers")


def _op(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    name = params.get("name")
    return params.get("family", name if name in {entry.name for entry in CATALOGUE} else "")


# Processes of pytest-xdist inherit it, and agree past midnight as well.
TODAY = os.environ.setdefault("JAXBP_TESTS_DAY", str(datetime.date.today().toordinal()))


def pytest_addoption(parser):
    skip_rule.pytest_addoption(parser)
    help = "of the tests that are marked rotating run one in N, others each day, and all within N days"
    parser.getgroup("rotation").addoption("--rotate", type=int, default=1, metavar="N", help=help)


def _rotated(config, items):
    """The items of today: a test is drawn by its name, so that a new one changes no other's day, or by its group's."""
    parts = config.getoption("rotate")

    def is_for_another_day(item):
        mark = item.get_closest_marker("rotating")
        return mark and (zlib.crc32(mark.kwargs.get("group", item.nodeid).encode()) + int(TODAY)) % parts

    left_out = [item for item in items if is_for_another_day(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]


def pytest_collection_modifyitems(config, items):
    _rotated(config, items)
    # The tests of one op, or of one family, stand together: with pytest-xdist, whose processes begin with a half or a
    # quarter of all tests, a process compiles what they share once.
    items.sort(key=_op)
    skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0 or higher")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def _exact_products():
    """Float32 means float32 on every platform, so that one set of tolerances holds."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_hopper():
    """`None` chooses, and kernels are traced, for an H200, also where there is no GPU."""
    with targeting(HOPPER):
        yield

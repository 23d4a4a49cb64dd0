"""Kernels compiled ahead of their program: when this happens, and that the program finds them compiled.

Compilation needs CUDA's compiler. `ahead_of_time.missing` returns which part of it is not installed.
"""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from ahead_of_time import missing
from helpers import cuda_program
from jax.sharding import AxisType
from planted import double, rows, run

from pallas_kernels.core import compilation, launch

ROOT = Path(__file__).parents[3]


def context(platforms=("cuda",), for_export=False):
    return SimpleNamespace(platforms=platforms, lowering_parameters=SimpleNamespace(for_export=for_export))


@pytest.fixture
def a_gpu_and_cores(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compilation, "_cores", lambda: 4)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("a_gpu_and_cores")
def test_kernels_of_a_program_for_the_gpu_of_this_machine_are_compiled_ahead():
    assert compilation.compiles_ahead(context())


@pytest.mark.usefixtures("a_gpu_and_cores")
@pytest.mark.parametrize("other", [context(platforms=("cpu",)), context(("cpu", "cuda")), context(for_export=True)])
def test_those_of_other_programs_are_not(other):
    assert not compilation.compiles_ahead(other)


@pytest.mark.usefixtures("a_gpu_and_cores")
def test_nothing_is_compiled_ahead_on_few_cores(monkeypatch):
    monkeypatch.setattr(compilation, "_cores", lambda: 2)
    assert not compilation.compiles_ahead(context())


@pytest.mark.usefixtures("a_gpu_and_cores")
def test_nothing_is_compiled_ahead_where_programs_are_kept(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert not compilation.compiles_ahead(context())


@pytest.mark.usefixtures("a_gpu_and_cores")
def test_without_a_gpu_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not compilation.compiles_ahead(context())


def test_a_body_is_traced_once(monkeypatch):
    compiled, traced = [], []
    monkeypatch.setattr(launch, "compiles_ahead", lambda module_context: True)
    monkeypatch.setattr(compilation, "_compile", lambda *a: compiled.append(a))

    def body(x_ref, y_ref, *, i):
        traced.append(i)
        double(x_ref, y_ref, i=i)

    with ThreadPoolExecutor(1) as threads:  # on exit, it waits for the compilations
        monkeypatch.setattr(compilation, "_threads", lambda: threads)
        assert "mosaic_gpu" in cuda_program(lambda x: run(body, x), rows())
    assert len(traced) == len(compiled) == 1


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Auto)])
def test_a_kernel_is_compiled_ahead_for_one_device_also_under_a_mesh(kinds, monkeypatch):
    compiled = []
    monkeypatch.setattr(launch, "compiles_ahead", lambda module_context: True)
    threads = SimpleNamespace(submit=lambda _, exported, structs: compiled.append(exported))
    monkeypatch.setattr(compilation, "_threads", lambda: threads)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    for under in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        jax.clear_caches()
        with under:
            assert "mosaic_gpu" in cuda_program(lambda x: run(double, x), rows())
    assert [exported.nr_devices for exported in compiled] == [1, 1]
    assert len({exported.mlir_module() for exported in compiled}) == 1


SCRIPT = """
import jax
from ahead_of_time import gpus
from pallas_kernels.core import compilation, device, launch
from planted import double, rows, run

x = jax.eval_shape(rows)
with gpus(device.HOPPER) as (gpu,):
    jax.config.update("jax_default_device", gpu)
    launch.compiles_ahead = lambda module_context: True
    sharding = jax.sharding.SingleDeviceSharding(gpu)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    program = jax.jit(lambda x: run(double, x)).trace(x).lower(lowering_platforms=("cuda",))
    compilation._threads().shutdown()
    print("lowered", flush=True)
    program.compile()
"""


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_program_finds_its_kernel_compiled():
    # Mosaic GPU prints each kernel that it compiles.
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "MOSAIC_GPU_DUMP_PTX": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ahead, after = done.stdout.split("lowered\n")
    assert ahead.count("Generated by LLVM NVPTX") == 1
    assert after.count("Generated by LLVM NVPTX") == 0

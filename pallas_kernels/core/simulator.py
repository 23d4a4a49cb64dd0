"""The Mosaic GPU simulator, which runs kernels on a CPU, fills unwritten memory with NaN, and finds data races.

Only this file imports the simulator's private parts from JAX (partly public from 0.12 on).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.interpreters import mlir

# A JAX context instead of a global, because its value is part of jit's cache key.
_simulation = jax.make_user_context(None)


def simulating() -> Any:
    """Return the simulator's parameters within `simulated`, else None."""
    return _simulation.value


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Return a context in which kernels run in the Mosaic GPU simulator, on the CPU.

    This is slow: each memory access is a call of the host. Memory starts as NaN (integers: their largest value). A read
    out of bounds raises, and a data race raises `RuntimeError` here or an error where it happens.
    """
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # Before JAX 0.12 the simulator passes a cast to XLA, which has no rule for it. Here arrays have no layout.
    mlir.register_lowering(layout_cast_p, lambda context, x, **layout: [x], platform="cpu")
    simulator.reset_gpu_interpret_mode_state()
    try:
        with _simulation(InterpretGPUParams(detect_races=True)):
            yield
        jax.effects_barrier()
        if simulator.gpu_callbacks._races is not None and simulator.get_races().races_found:
            raise RuntimeError("pallas_kernels: the simulator found a data race; its report is on standard output")
    finally:
        simulator.reset_gpu_interpret_mode_state()

"""The Mosaic GPU simulator, which runs kernels on a CPU, and uses private modules of JAX."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.interpreters import mlir

# A context's value is part of jit's cache key.
_simulation = jax.make_user_context(None)
interpreting = jax.make_user_context(False)
"""Within `interpreting(True)`, a kernel's body is traced for Pallas' interpreter."""


def simulating() -> Any:
    """Return the simulator's parameters within `simulated`, else None."""
    return _simulation.value


def without_registers() -> bool:
    """Return whether the simulator or Pallas' interpreter runs the body, so that arrays have no register layout."""
    return simulating() is not None or interpreting.value


FINDS_RACES = jax.__version_info__ >= (0, 12)


@contextlib.contextmanager
def simulated(detect_races: bool = FINDS_RACES) -> Iterator[None]:
    """Return a context in which kernels run in the Mosaic GPU simulator, slowly, on the CPU.

    Uninitialized floats are NaN, and uninitialized integers the largest value. Out-of-bounds reads raise errors. From
    JAX 0.12 on, a data race raises an error where it occurs, or a `RuntimeError` when the context ends.

    Raises:
      NotImplementedError: `detect_races` is True before JAX 0.12, whose simulator finds no race.
    """
    if detect_races and not FINDS_RACES:
        raise NotImplementedError(
            f"simulated: detect_races is True, and JAX is {jax.__version__}, whose simulator finds no race; wants JAX "
            "0.12 or newer"
        )
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # Before JAX 0.12, the simulator passes layout casts, which do nothing there, to XLA, which cannot lower them.
    mlir.register_lowering(layout_cast_p, lambda context, x, **layout: [x], platform="cpu")
    simulator.reset_gpu_interpret_mode_state()
    try:
        with _simulation(InterpretGPUParams(detect_races=detect_races)):
            yield
        jax.effects_barrier()
        if simulator.gpu_callbacks._races is not None and simulator.get_races().races_found:
            raise RuntimeError("pallas_kernels: the simulator found a data race; its report is on standard output")
    finally:
        simulator.reset_gpu_interpret_mode_state()

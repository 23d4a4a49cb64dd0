import jax
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulated

in_the_simulator = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack layouts of shared memory"
)


def doubled(x, stages):
    """Compute 2 x, while one warpgroup fetches ahead."""
    rows = x.shape[0]

    def body(x_ref, y_ref, ring_ref, loaded, *, program):
        def copy(step, stage, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[step], ring_ref.at[stage], barrier)

        ring = Ring(stages, copy, loaded, steps=rows)
        ring.prefetch(stages)

        def step(i, _):
            ring.wait(i)
            y_ref[i] = 2 * ring_ref[ring.stage(i)]
            plgpu.commit_smem()
            ring.fetch(i + stages)

        lax.fori_loop(0, rows, step, None)

    return launch(
        body,
        x,
        out=x,
        grid={"program": 1},
        scratch=[plgpu.SMEM((stages, LANES), x.dtype), plgpu.Barrier(num_barriers=stages)],
        name="doubled",
    )


def doubled_by_consumer(x, stages):
    rows = x.shape[0]

    def body(x_ref, y_ref, ring_ref, loaded, free, *, program, warpgroup):
        def copy(step, stage, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[step], ring_ref.at[stage], barrier)

        ring = Ring(stages, copy, loaded, free=free)

        @pl.when(warpgroup == 1)
        def _():
            lax.fori_loop(0, rows, lambda i, _: ring.produce(i), None)
            ring.drain(rows)

        @pl.when(warpgroup == 0)
        def _():
            def step(i, _):
                ring.wait(i)
                y_ref[i] = 2 * ring_ref[ring.stage(i)]
                plgpu.commit_smem()
                ring.release(i)

            lax.fori_loop(0, rows, step, None)

    return launch(
        body,
        x,
        out=x,
        grid={"program": 1},
        warpgroups=2,
        scratch=[
            plgpu.SMEM((stages, LANES), x.dtype),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        name="doubled_by_consumer",
    )


kernels = pytest.mark.parametrize("kernel", [doubled, doubled_by_consumer])


@in_the_simulator
@kernels
@pytest.mark.parametrize(("rows", "stages"), [(1, 3), (3, 3), (7, 3), (5, 1)])
def test_every_row_comes_through_in_its_order(kernel, rows, stages):
    (x,) = normal((rows, LANES))
    with on_the_cpu(), simulated():
        np.testing.assert_array_equal(kernel(x, stages), 2 * x)


@kernels
def test_they_lower_for_cuda(kernel):
    assert "mosaic_gpu" in cuda_program(lambda x: kernel(x, 3), *normal((7, LANES)))


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize(("rows", "stages"), [(1, 3), (1000, 3), (1000, 1)])
def test_gpu_every_row_comes_through_in_its_order(kernel, rows, stages):
    (x,) = normal((rows, LANES))
    np.testing.assert_array_equal(jax.jit(lambda x: kernel(x, stages))(x), 2 * x)


@in_the_simulator
def test_a_stage_that_is_filled_while_it_is_read_is_found_by_the_simulator():
    def hasty(x):
        def body(x_ref, y_ref, ring_ref, loaded, free, *, program, warpgroup):
            def copy(step, stage, barrier):
                plgpu.copy_gmem_to_smem(x_ref.at[step], ring_ref.at[stage], barrier)

            ring = Ring(1, copy, loaded, free=free)
            pl.when(warpgroup == 1)(lambda: lax.fori_loop(0, x.shape[0], lambda i, _: ring.produce(i), None))

            @pl.when(warpgroup == 0)
            def _():
                def step(i, _):
                    ring.wait(i)
                    ring.release(i)
                    y_ref[i] = 2 * ring_ref[0]

                lax.fori_loop(0, x.shape[0], step, None)

        scratch = [plgpu.SMEM((1, LANES), x.dtype), plgpu.Barrier(num_barriers=1), plgpu.Barrier(num_barriers=1)]
        return launch(body, x, out=x, grid={"program": 1}, warpgroups=2, scratch=scratch, name="hasty")

    (x,) = normal((4, LANES))
    with on_the_cpu(), pytest.raises((jax.errors.JaxRuntimeError, RuntimeError), match=r"(?i)race"), simulated():
        jax.block_until_ready(hasty(x))

"""The kernels of every op compile for Hopper, Blackwell, and Blackwell RTX. This needs CUDA's compiler, but no GPU."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from cuda_compiler import kernels_compiled, missing
from helpers import ENTRIES, case_of, op_of, results_of, value_and_gradients
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxbp
from jaxbp.training.optimizers import fused_adamw
from pallas_kernels.core import device

DEVICES = {"9.0": device.HOPPER, "10.0": device.BLACKWELL, "12.0": device.BLACKWELL_RTX}
BATCH = 8192
WITHOUT_WGMMA = {
    *(
        "automaton_rollout",
        "conv2d",
        "conv2d_relu_max_pool2d",
        "divide",
        "gate_layer",
        "layer_norm",
        "layer_norm_linear",
        "linear",
    ),
    *("conv1d", "logic_conv2d", "logic_conv2d_or_pool2d", "max_pool2d", "relu", "rms_norm", "softmax_cross_entropy"),
}


def _wgmma():
    def body(a, b, y, a_shared, b_shared, arrived):
        plgpu.copy_gmem_to_smem(a, a_shared, arrived)
        plgpu.copy_gmem_to_smem(b, b_shared, arrived)
        plgpu.barrier_wait(arrived)

        def product(total):
            plgpu.wgmma(total, a_shared, b_shared)
            return total[...]

        y[...] = pl.run_scoped(product, plgpu.ACC((64, 128), jnp.float32))

    layout = dict(transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    shapes = [(64, 64), (64, 128)]
    scratch = [*(plgpu.SMEM(shape, jnp.bfloat16, **layout) for shape in shapes), plgpu.Barrier(num_arrivals=2)]
    out = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch), [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes
    ]


def _case(name, place, implementation, dtype="float32"):
    op, arrays = op_of(name, place, implementation), case_of(name, place).structs(BATCH if place else 2, dtype)
    if "_backward" in name:
        return op, arrays
    return value_and_gradients(op), (arrays, results_of(op, arrays))


def _all_of(cases):
    """Join the cases, because XLA takes longer for many programs than for one of the same size."""
    functions, arguments = zip(*itertools.starmap(_case, cases), strict=True)
    return lambda *of_each: [f(*a) for f, a in zip(functions, of_each, strict=True)], arguments


def _automaton(implementation):
    automaton = jaxbp.Automaton.create(8, 16, [8, 4, 2], [256, 128, 64, 32, 16, 8, 8], periodic=True, seed=0)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    logits = (
        [struct((automaton.kernels, wires.gates, 16)) for wires in automaton.perception],
        [struct((wires.gates, 16)) for wires in automaton.update],
    )

    def loss(logits, state, key):
        last = jaxbp.automaton_rollout(
            logits, automaton, state, 2, key=key, fire_rate=0.6, implementation=implementation
        )
        return jnp.sum(last)

    return jax.grad(loss), (logits, struct((2, 16, 16, 8)), jax.eval_shape(lambda: jax.random.key(0)))


def _update():
    shapes = [(), (5,), (1000,), (64, 129)]
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes for dtype in ("float32", "bfloat16")]
    optimizer = fused_adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1, clip=1.0, implementation="pallas")
    return optimizer.apply, (params, jax.eval_shape(optimizer.init, params), params)


def _with_kernels(name, place, dtype, precision):
    function, arguments = _case(name, place, "pallas", dtype)
    return jax.default_matmul_precision(precision)(function), arguments


def _programs(architecture):
    chosen = {}
    for name, entry in ENTRIES.items():
        # A pair's forward and backward call every kernel. Tests on a GPU run all places on Hopper.
        one = entry.like or architecture == "9.0" or re.search("_backward|_with_", name)
        places = [*entry.real][: 1 if one else None]
        chosen.setdefault(entry.like or name, []).extend((name, place, None) for place in places)
    for name, cases in chosen.items():
        yield f"{name} and what is like it, None", functools.partial(_all_of, cases)
    for name in chosen:
        if not re.search("_backward|_with_", name):
            cases = [(None, "bfloat16", "default"), (None, "float32", "default"), (None, "float32", "highest")]
            # None leaves some ops to XLA on GPUs other than Hopper.
            if architecture != "9.0":
                cases.append((next(iter(ENTRIES[name].real)), "float32", "highest"))
            # The Hopper kernel of this op refuses float32.
            elif name == "conv2d_relu_max_pool2d":
                cases.extend((place, "bfloat16", "default") for place in ENTRIES[name].real)
            for case in cases:
                yield ", ".join(map(str, (name, "pallas", *case))), functools.partial(_with_kernels, name, *case)
    for implementation in ("pallas", None):
        yield f"automaton_rollout, {implementation}", functools.partial(_automaton, implementation)
    yield "update", _update
    yield "wgmma", _wgmma


def _compile_all(architecture):
    """Print JSON before and after each program, because a compiler may end the process."""
    for label, make in _programs(architecture):
        print(json.dumps({"program": label}), flush=True)
        try:
            function, arguments = make()
            outcome = {"kernels": kernels_compiled(DEVICES[architecture], function, *arguments)}
        except NotImplementedError as refused:
            outcome = {"refused": str(refused)}
        except Exception as failed:
            outcome = {"failed": f"{type(failed).__name__}: {failed}"[:1000]}
        print(json.dumps({"program": label} | outcome), flush=True)


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
@pytest.mark.parametrize("architecture", DEVICES)
def test_every_op_compiles(architecture):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__, architecture]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended while compiling {lines[-1:]}\n{done.stderr}"
    outcomes = {line.pop("program"): line for line in lines}

    # A kernel compiled only when it is loaded would compile for every architecture.
    wgmma = outcomes.pop("wgmma")
    assert ("wgmma" in wgmma.get("failed", "")) == (architecture != "9.0"), wgmma

    assert {label: outcome for label, outcome in outcomes.items() if "failed" in outcome} == {}
    assert [label for label, outcome in outcomes.items() if label.endswith("None") and "refused" in outcome] == []
    assert outcomes["update"]["kernels"] == 2
    with_kernels = {label.split(",")[0] for label, outcome in outcomes.items() if outcome.get("kernels")}
    assert with_kernels >= WITHOUT_WGMMA


if __name__ == "__main__":
    _compile_all(sys.argv[1])

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import cuda_program, on_the_cpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxbp.training.optimizers import _kernel_is_faster, apply, fused_adamw
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.launch import CHANGES_IN_PLACE
from pallas_kernels.core.simulator import simulated

MASK = {"a": True, "b": False, "c": True, "d": {"e": False, "f": True}, "g": True, "h": False}
"""Which of the parameters decay. One boolean covers the whole list "b"."""


def _of_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


RATE = optax.cosine_decay_schedule(0.1, 10)
PAIRS = {
    "adam": (functools.partial(fused_adamw, 0.1, weight_decay=0.0), optax.adam(0.1)),
    "adamw": (
        functools.partial(fused_adamw, RATE, 0.8, 0.99, 1e-6, weight_decay=0.1),
        optax.adamw(RATE, 0.8, 0.99, 1e-6, weight_decay=0.1),
    ),
    "clip": (
        functools.partial(fused_adamw, RATE, weight_decay=0.0, clip=0.5),
        optax.chain(optax.clip(0.5), optax.adam(RATE)),
    ),
    "Optax's defaults": (functools.partial(fused_adamw, 0.1), optax.adamw(0.1)),
    "arrays": (
        lambda **options: fused_adamw(
            *map(jnp.float32, (0.1, 0.8, 0.99, 1e-6)), weight_decay=jnp.float32(0.1), clip=jnp.float32(0.5), **options
        ),
        optax.chain(optax.clip(0.5), optax.adamw(0.1, 0.8, 0.99, 1e-6, weight_decay=0.1)),
    ),
    "mask": (
        functools.partial(fused_adamw, 0.1, weight_decay=0.1, mask=MASK),
        optax.adamw(0.1, weight_decay=0.1, mask=MASK),
    ),
    "mask of a function": (
        functools.partial(fused_adamw, 0.1, weight_decay=0.1, mask=_of_matrices),
        optax.adamw(0.1, weight_decay=0.1, mask=_of_matrices),
    ),
}
SHAPES = {
    "a": (),
    "b": [(1,), (5,), (127,)],
    "c": (128,),
    "d": {"e": (129,), "f": (0, 2)},
    "g": (10, 100),
    "h": (1030,),
}
LARGE = SHAPES | {"i": (70000,)}
every_pair = pytest.mark.parametrize("name", PAIRS)


def drawn(shapes, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.standard_normal(shape), dtype), shapes, is_leaf=lambda s: type(s) is tuple
    )


def steps_of(optimizer, shapes, dtype="float32", steps=3, finite=None):
    params = drawn(shapes, dtype)
    state = optimizer.init(params)
    step = jax.jit(functools.partial(apply, optimizer))
    for i in range(steps):
        params, state = step(drawn(shapes, dtype, i + 1), state, params, finite)
    return params, state


@functools.cache
def optaxs_steps(name):
    with on_the_cpu():
        return steps_of(PAIRS[name][1], SHAPES)


def check(results, wanted, tolerance):
    assert jax.tree.structure(results) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


@every_pair
def test_the_kernel_takes_optaxs_steps(name):
    make, _ = PAIRS[name]
    with on_the_cpu(), simulated():
        results = jax.block_until_ready(steps_of(make(implementation="pallas"), SHAPES))
    check(results, optaxs_steps(name), 5e-7)  # the numbers are at most 3, with a spacing of 2.4e-7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "mask"])
def test_the_kernel_takes_optaxs_steps_on_a_gpu(name, dtype):
    make, optax_optimizer = PAIRS[name]
    if (name, dtype) == ("arrays", "bfloat16"):
        with pytest.raises(NotImplementedError, match=r"does not take a state of bfloat16 that becomes float32"):
            steps_of(make(implementation="pallas"), LARGE, dtype)
        return
    results = steps_of(make(implementation="pallas"), LARGE, dtype)
    check(results, steps_of(optax_optimizer, LARGE, dtype), 2e-6 if dtype == "float32" else 3e-2)
    again = steps_of(make(implementation="pallas"), LARGE, dtype)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(again), strict=True))


# In float16, Optax rounds the default eps to 0, and divides by it.
@pytest.mark.parametrize(("eps", "dtype"), [(1e-8, "bfloat16"), (1e-2, "float16")])
def test_half_precisions_are_computed_in_float32(eps, dtype):
    shapes, steps = {"a": (5,), "b": (129,)}, dict(dtype=dtype, steps=2)
    with on_the_cpu():
        wanted = steps_of(optax.adam(0.1, eps=eps), shapes, **steps)
        with simulated():
            results = steps_of(fused_adamw(0.1, eps=eps, weight_decay=0.0, implementation="pallas"), shapes, **steps)
            check(jax.block_until_ready(results), wanted, 2e-2)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@every_pair
def test_off_a_gpu_every_implementation_is_optaxs(name, implementation):
    make, _ = PAIRS[name]
    with on_the_cpu():
        check(steps_of(make(implementation=implementation), SHAPES), optaxs_steps(name), 5e-7)


@pytest.mark.parametrize("implementation", ["autodiff", None])
@every_pair
def test_off_a_gpu_every_implementation_but_the_kernel_is_the_same_program(name, implementation):
    make, _ = PAIRS[name]

    def program(implementation):
        optimizer, params = make(implementation=implementation), drawn(SHAPES)
        return str(jax.make_jaxpr(functools.partial(apply, optimizer))(params, optimizer.init(params), params))

    with on_the_cpu():
        assert program(implementation) == program("xla")


@every_pair
def test_state_and_update_are_optaxs(name):
    make, optax_optimizer = PAIRS[name]
    params, grads = drawn(SHAPES), drawn(SHAPES, seed=1)
    optimizer, state = make(), optax_optimizer.init(params)
    check(optimizer.init(params), state, 0)
    tolerance = 5e-7 if name == "arrays" else 0  # 0.99 is rounded to float32
    check(optimizer.update(grads, state, params), optax_optimizer.update(grads, state, params), tolerance)
    chained = optax.chain(optimizer, optax.scale(2.0))
    chained.update(grads, chained.init(params), params)


def test_a_step_that_is_not_finite_changes_nothing():
    optimizer, shapes = PAIRS["clip"][0](implementation="pallas"), {"a": (5,), "b": (129,)}
    start = drawn(shapes), optimizer.init(drawn(shapes))
    with on_the_cpu(), simulated():
        check(steps_of(optimizer, shapes, steps=1, finite=jnp.bool(False)), start, 0)
        after = steps_of(optimizer, shapes, steps=1, finite=jnp.bool(True))
    with on_the_cpu():
        check(after, steps_of(optimizer, shapes, steps=1), 5e-7)


def test_the_learning_rate_may_be_traced():
    grads, params = drawn(SHAPES, seed=1), drawn(SHAPES)

    @jax.jit
    def step(rate):
        optimizer = fused_adamw(rate, weight_decay=0.0, implementation="pallas")
        return optimizer.apply(grads, optimizer.init(params), params)[0]

    def optaxs(rate):
        optimizer = optax.adam(rate)
        return apply(optimizer, grads, optimizer.init(params), params)[0]

    with on_the_cpu():
        wanted = [optaxs(rate) for rate in (0.1, 0.2)]
        for rate, tree in zip((0.1, 0.2), wanted, strict=True):
            check(step(rate), tree, 5e-7)
        with simulated():
            check(jax.block_until_ready(step(0.1)), wanted[0], 5e-7)


def trained(optimizer, params, grads):
    def step(carry, g):
        params, state = carry
        return optimizer.apply(g, state, params), None

    return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0]


@every_pair
def test_a_step_is_one_launch_a_dtype(name):
    optimizer = PAIRS[name][0](implementation="pallas")
    params, grads = drawn(SHAPES), drawn(SHAPES, seed=1)
    groups = 2 if "mask" in name else 1
    assert cuda_program(optimizer.apply, grads, optimizer.init(params), params).count("@mosaic_gpu") == groups
    if name == "arrays":
        return  # arrays in float32 would change the dtype of a bfloat16 state
    mixed = params | {"h": params["h"].astype("bfloat16")}, grads | {"h": grads["h"].astype("bfloat16")}
    launches = cuda_program(optimizer.apply, mixed[1], optimizer.init(mixed[0]), mixed[0]).count("@mosaic_gpu")
    assert launches == groups + 1


def test_none_takes_the_kernel_where_it_saves_launches(on_hopper):
    optimizer = fused_adamw(0.1, weight_decay=0.0)

    def launches(shapes, dtype="float32"):
        params = drawn(shapes, dtype)
        return cuda_program(optimizer.apply, params, optimizer.init(params), params).count("@mosaic_gpu")

    assert launches(SHAPES) == CHANGES_IN_PLACE
    assert launches({"a": (3,)}) == 0
    assert launches({"a": (3,), "b": (4,)}) == 0
    with jax.enable_x64(True):
        assert launches(SHAPES, "float64") == 0
    with on_the_cpu():
        check(steps_of(optimizer, SHAPES), steps_of(optax.adam(0.1), SHAPES), 5e-7)


@pytest.mark.skipif(not CHANGES_IN_PLACE, reason="the kernel is not faster before JAX 0.11.0")
def test_the_kernel_is_for_more_arrays_than_launches_and_for_small_arrays(on_hopper):
    def faster(*shapes):
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return _kernel_is_faster([arrays] * 3, [arrays])

    assert [faster((0,), *[(4,)] * n) for n in (2, 3)] == [False, True]
    assert [faster(*[(2**n, 2)] * 3) for n in (18, 19)] == [True, False]


def test_in_a_scan_with_donated_arrays():
    params = drawn(SHAPES)
    grads = jax.tree.map(lambda *a: jnp.stack(a), *(drawn(SHAPES, seed=i) for i in range(1, 4)))
    make, optax_optimizer = PAIRS["adamw"]
    program = jax.jit(functools.partial(trained, make()), donate_argnums=0)
    wanted = steps_of(optax_optimizer, SHAPES)
    check(program(params, grads), wanted, 2e-6)
    assert jax.default_backend() == "cpu" or all(a.is_deleted() for a in jax.tree.leaves(params))


def test_outside_of_jit_and_under_vmap():
    optimizer = PAIRS["adam"][0]()
    params, grads = drawn(SHAPES), drawn(SHAPES, seed=1)
    state = optimizer.init(params)
    after = optimizer.apply(grads, state, params)
    check(after, jax.jit(optimizer.apply)(grads, state, params), 5e-7)
    two = lambda tree: jax.tree.map(lambda a: jnp.stack([a, a]), tree)  # noqa: E731
    mapped = jax.vmap(PAIRS["adam"][0](implementation="pallas").apply)
    check(mapped(two(grads), two(state), two(params)), two(after), 2e-6)
    assert "mosaic_gpu" not in cuda_program(mapped, two(grads), two(state), two(params))


def test_the_gradient_through_a_step_is_optaxs():
    # With a small eps, the gradient through the first step is nearly 0.
    options, shapes = dict(eps=0.1, weight_decay=0.1), {"a": (5,), "b": (129,)}
    optax_optimizer, fused = optax.adamw(0.1, **options), fused_adamw(0.1, **options, implementation="pallas")

    def loss(optimizer, params, grads):
        return sum(jnp.sum(a**2) for a in jax.tree.leaves(apply(optimizer, grads, optimizer.init(params), params)[0]))

    arrays = drawn(shapes), drawn(shapes, seed=1)
    wanted = jax.grad(loss, (1, 2))(optax_optimizer, *arrays)
    check(jax.jit(jax.grad(functools.partial(loss, fused), (0, 1)))(*arrays), wanted, 1e-5)


def test_within_inject_hyperparams_it_is_optaxs():
    options, params, grads = dict(b1=0.8, weight_decay=0.1), drawn(SHAPES), drawn(SHAPES, seed=1)

    def after_two_steps(factory, **more):
        optimizer = optax.inject_hyperparams(factory, static_args="mask")(RATE, **options, mask=_of_matrices, **more)
        state, results = optimizer.init(params), []
        for _ in range(2):
            updates, state = jax.jit(optimizer.update)(grads, state, params)
            state.hyperparams["weight_decay"] *= 2
            results.append((updates, state.hyperparams["learning_rate"], state.inner_state))
        return results

    check(after_two_steps(fused_adamw), after_two_steps(optax.adamw), 0)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_it_is_optaxs_path(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    params = jax.device_put({"a": jnp.ones((4, 3)), "b": jnp.ones(6)}, NamedSharding(mesh, PartitionSpec("x")))
    optimizer, kernel = (fused_adamw(0.1, weight_decay=0.0, implementation=i) for i in (None, "pallas"))
    state = optimizer.init(params)
    with targeting(HOPPER):
        step = jax.jit(optimizer.apply).trace(params, state, params)
        assert "launch" not in str(step.jaxpr)
    new, _ = jax.jit(optimizer.apply)(params, state, params)
    assert new["a"].sharding.is_equivalent_to(params["a"].sharding, 2)
    np.testing.assert_allclose(new["b"], 0.9, rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"^fused_adamw: .* arrays on a mesh of several devices"):
        jax.jit(kernel.apply)(params, state, params)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fused_adamw(jnp.ones(2)), ValueError, r"fused_adamw: learning_rate has shape \(2,\)"),
        (lambda: fused_adamw("0.1"), TypeError, "fused_adamw: learning_rate is '0.1'"),
        (lambda: fused_adamw(0.1, b1=1.0), ValueError, "fused_adamw: b1 is 1.0"),
        (lambda: fused_adamw(0.1, b2="0.9"), TypeError, "fused_adamw: b2 is '0.9'"),
        (lambda: fused_adamw(0.1, clip=0), ValueError, "fused_adamw: clip is 0; wants a number above 0"),
        (lambda: fused_adamw(0.1, weight_decay=None), TypeError, "fused_adamw: weight_decay is None"),
    ],
)
def test_numbers_out_of_range_are_refused(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_trees_that_do_not_belong_together_are_refused():
    optimizer, params = fused_adamw(0.1), {"a": jnp.ones(3)}
    state = optimizer.init(params)
    for grads, state_, message in [
        ({"b": jnp.ones(3)}, state, "grads and params have the structures"),
        ({"a": jnp.ones(4)}, state, r"grads\['a'\] and params\['a'\] have the shapes \(4,\) and \(3,\)"),
        (params, optax.sgd(0.1).init(params), "state has the structure"),
        (params, optimizer.init({"a": jnp.ones(4)}), "state has the structure"),
    ]:
        with pytest.raises(ValueError, match=f"^fused_adamw: {message}"):
            optimizer.apply(grads, state_, params)


def test_what_the_kernel_does_not_take_is_refused_by_pallas_alone():
    optimizer, params = fused_adamw(0.1, implementation="pallas"), {"a": jnp.ones(3, "bfloat16")}
    with pytest.raises(NotImplementedError, match="a state of bfloat16 that becomes float32"):
        optimizer.apply({"a": jnp.ones(3)}, optimizer.init(params), params)
    integers = {"a": jnp.arange(3)}
    with pytest.raises(NotImplementedError, match="dtype int32"):
        optimizer.apply(integers, optimizer.init(integers), integers)
    with pytest.raises(ValueError, match="fused_adamw: implementation is 'cuda'"):
        fused_adamw(0.1, implementation="cuda").apply(params, optimizer.init(params), params)

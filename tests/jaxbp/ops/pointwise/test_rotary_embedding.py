import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, normal, on_the_cpu, ours
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jaxbp import rotary_embedding, rotary_embedding_backward

POSITIONS = jnp.array([[[0], [1], [2]], [[700], [3], [0]]])


def complex_rotation(x, positions, base=10_000.0, interleaved=False):
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    z = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    angles = np.asarray(positions)[..., None] * base ** -(np.arange(half) / half)
    z = z * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1 if interleaved else -2).reshape(x.shape)


@pytest.mark.parametrize("interleaved", [False, True])
@every_implementation
def test_values_are_products_of_complex_numbers_and_gradients_the_opposite_rotation(interleaved, implementation):
    x, dy = normal((2, 3, 4, 6), (2, 3, 4, 6))
    options = dict(base=500.0, interleaved=interleaved)
    op = functools.partial(rotary_embedding, positions=POSITIONS, **options, implementation=implementation)
    y, vjp = jax.vjp(op, x)
    assert_close(y, complex_rotation(x, POSITIONS, **options), "float32")
    dx = complex_rotation(dy, -POSITIONS, **options)
    backward = rotary_embedding_backward(dy, POSITIONS, **options, implementation=implementation)
    assert_close([*vjp(dy), backward], [dx, dx], "float32")


def test_the_default_base_is_10000_and_pairs_are_halves():
    (x,) = normal((2, 3, 4, 6))
    assert_close(rotary_embedding(x, POSITIONS), complex_rotation(x, POSITIONS), "float32")


def test_the_half_split_of_permuted_features_is_the_interleaved_rotation():
    (x,) = normal((2, 3, 4, 6))
    permuted = x.reshape(2, 3, 4, 2, 3).swapaxes(-1, -2).reshape(x.shape)
    y = rotary_embedding(permuted, POSITIONS, interleaved=True).reshape(2, 3, 4, 3, 2).swapaxes(-1, -2)
    np.testing.assert_array_equal(y.reshape(x.shape), rotary_embedding(x, POSITIONS))


@every_implementation
def test_products_depend_only_on_the_distance_of_positions(implementation):
    q, k = normal((5, 8), (5, 8))
    op = functools.partial(rotary_embedding, implementation=implementation)

    def scores(shift):
        return jnp.sum(op(q, jnp.arange(5) + shift) * op(k, jnp.arange(5) + shift + 3), axis=-1)

    np.testing.assert_allclose(scores(11), scores(0), rtol=1e-4, atol=1e-4)


@every_implementation
def test_frequencies_replace_the_base(implementation):
    (x,) = normal((2, 3, 4, 6))
    op = functools.partial(rotary_embedding, x, POSITIONS, implementation=implementation)
    assert_close(op(frequencies=[10_000 ** -(i / 3) for i in range(3)]), complex_rotation(x, POSITIONS), "float32")
    np.testing.assert_array_equal(op(frequencies=np.zeros(3)), x)
    np.testing.assert_array_equal(op(frequencies=jnp.zeros(3)), x)


@ours
def test_only_the_positions_are_saved(implementation):
    op = functools.partial(rotary_embedding, positions=POSITIONS, implementation=implementation)
    _, vjp = jax.vjp(op, jnp.ones((2, 3, 40, 64)))
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp)) <= POSITIONS.size


@ours
def test_half_precisions_are_rotated_in_float32(implementation):
    # At position 701, bfloat16 would round the angle to 700 or 704.
    x, dy = (a.astype(jnp.bfloat16) for a in normal((2, 1, 6), (2, 1, 6)))
    positions = jnp.array([[701], [703]])
    y, vjp = jax.vjp(lambda x: rotary_embedding(x, positions, implementation=implementation), x)
    assert_close(y, complex_rotation(x, positions), "bfloat16")
    assert_close(vjp(dy)[0], complex_rotation(dy, -positions), "bfloat16")


@ours
def test_vmap_maps_x_and_positions(implementation):
    (x,) = normal((3, 2, 4, 6))
    op = functools.partial(rotary_embedding, implementation=implementation)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(op, (1, 0))(x, POSITIONS))))
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(rotary_embedding(x, POSITIONS, implementation="autodiff"))))
    assert_close(gradient(x), expected(x.swapaxes(0, 1)).swapaxes(0, 1), "float32")


def test_check_grads_to_second_order():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4, 6)))
        op = functools.partial(rotary_embedding, positions=POSITIONS, interleaved=True, implementation="xla")
        check_grads(lambda x: jnp.sin(op(x)), (x,), order=2, modes=("rev",))


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_the_gradient_is_exported_for_any_batch_and_length(implementation):
    batch, length = jax.export.symbolic_shape("batch, length")
    op = functools.partial(rotary_embedding, implementation=implementation)
    gradient = jax.jit(lambda x, positions: jax.grad(lambda x: jnp.sum(jnp.sin(op(x, positions))))(x))
    structs = [
        jax.ShapeDtypeStruct((batch, length, 4, 6), jnp.float32),
        jax.ShapeDtypeStruct((batch, length, 1), POSITIONS.dtype),
    ]
    with on_the_cpu():
        exported = jax.export.export(gradient)(*structs)
        for count in (1, 2):
            x, positions = normal((count, 3, 4, 6))[0], POSITIONS[:count]
            assert_close(exported.call(x, positions), gradient(x, positions), "float32")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("of_positions", [8, 1])
@ours
def test_on_a_mesh_each_device_rotates_its_examples(of_positions, axes, implementation):
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(axes,))
    x, positions = normal((8, 3, 2, 4))[0], jnp.arange(of_positions * 3).reshape(of_positions, 3, 1)
    sharded = NamedSharding(mesh, PartitionSpec("examples"))
    whole = NamedSharding(mesh, PartitionSpec())
    op = functools.partial(rotary_embedding, implementation=implementation)
    gradient = jax.jit(lambda x, positions: jax.vjp(lambda x: op(x, positions), x)[1](x)[0])
    with jax.set_mesh(mesh):
        arguments = jax.device_put(x, sharded), jax.device_put(positions, sharded if of_positions > 1 else whole)
        program = gradient.lower(*arguments).compile()
        dx = program(*arguments)
    assert "all-gather" not in program.as_text() and dx.sharding.is_equivalent_to(sharded, 4)
    assert_close(dx, rotary_embedding_backward(x, positions, implementation="autodiff"), "float32")


X = jnp.zeros((2, 3, 4, 6))
REFUSED = {
    "an odd number of features": (
        ValueError,
        lambda: rotary_embedding(X[..., :5], POSITIONS),
        r"rotary_embedding: x has shape \(2, 3, 4, 5\); wants \(..., head_dim\), with an even",
    ),
    "floating positions": (
        TypeError,
        lambda: rotary_embedding(X, X[..., :1, 0]),
        "rotary_embedding: positions has dtype float32; wants integers",
    ),
    "too few axes": (
        ValueError,
        lambda: rotary_embedding(X, POSITIONS[..., 0]),
        r"rotary_embedding: positions has shape \(2, 3\); wants 3 axes that broadcast to \(2, 3, 4\)",
    ),
    "another length": (
        ValueError,
        lambda: rotary_embedding_backward(X, POSITIONS[:, :2]),
        r"rotary_embedding_backward: positions has shape \(2, 2, 1\); wants 3 axes .*, the leading axes of dy",
    ),
    "base": (
        ValueError,
        lambda: rotary_embedding(X, POSITIONS, base=0.0),
        r"rotary_embedding: base is 0.0; wants a number in \[1.0, inf\]",
    ),
    "frequencies": (
        ValueError,
        lambda: rotary_embedding(X, POSITIONS, frequencies=(1.0, 0.1)),
        r"rotary_embedding: frequencies is \(1.0, 0.1\); wants 3 numbers, one per pair of features",
    ),
    "interleaved": (
        ValueError,
        lambda: rotary_embedding(X, POSITIONS, interleaved=1),
        "rotary_embedding: interleaved is 1; wants True or False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    error, call, message = REFUSED[case]
    with pytest.raises(error, match=f"^{message}"):
        call()


def _exact_angle(position, frequency):
    turns = fractions.Fraction(position) * fractions.Fraction(frequency) / TWO_PI
    return float((turns - round(turns)) * TWO_PI)


TWO_PI = 2 * fractions.Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899863")
FAR = [0, 1, 700, 131_072, 2**20 - 1, 2**24, 2**24 + 1, 2**31 - 1, -131_073, -(2**31)]


@every_implementation
@pytest.mark.parametrize("base", [1.0, 10_000.0, 1e9])
def test_far_positions_are_rotated_as_accurately_as_near_ones(base, implementation):
    frequencies = [base ** (-i / 16) for i in range(16)]
    angles = np.array([[_exact_angle(p, f) for f in frequencies] for p in FAR])
    z = np.ones_like(angles) + 2j
    x = jnp.asarray(np.concatenate([z.real, z.imag], -1), jnp.float32)
    op = functools.partial(rotary_embedding, positions=jnp.array(FAR), base=base, implementation=implementation)
    y, vjp = jax.vjp(op, x)
    for found, turned in ((y, z * np.exp(1j * angles)), (vjp(x)[0], z * np.exp(-1j * angles))):
        np.testing.assert_allclose(found[:, :16] + 1j * found[:, 16:], turned, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_positions_of_every_integer_dtype(dtype):
    x, positions = jnp.ones((2, 4)), jnp.array([3, 100])
    np.testing.assert_array_equal(rotary_embedding(x, positions.astype(dtype)), rotary_embedding(x, positions))


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_the_least_position_of_a_narrow_dtype(dtype):
    x, least = jnp.ones((1, 4)), np.array([np.iinfo(dtype).min])
    np.testing.assert_array_equal(rotary_embedding(x, least.astype(dtype)), rotary_embedding(x, least.astype("int32")))


def test_in_float64_positions_beyond_32_bits_are_accurate():
    with jax.enable_x64(True):
        positions = [5, 2**33 + 5, -(2**40)]
        y = rotary_embedding(jnp.array([[1.0, 0.0]] * 3), jnp.array(positions), frequencies=[0.1])
        angles = np.array([_exact_angle(p, 0.1) for p in positions])
        np.testing.assert_allclose(y, np.stack([np.cos(angles), np.sin(angles)], -1), atol=1e-6)

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.configs import logic
from experiments.configs.base import from_dict, to_dict
from experiments.configs.logic import ARCHITECTURES, LogicConfig, LogicConvConfig
from experiments.output.errors import UserError
from experiments.training import loop as training
from jaxbp import ConvolutionalCircuit


def test_gradients_are_clipped_element_by_element_at_100():
    assert LogicConfig().gradient_clip == 100.0
    clipped = training.make_optimizer(0.1, 10, clip=100.0)
    plain = training.make_optimizer(0.1, 10)
    updates = []
    for optimizer, gradient in ((clipped, [1e9, 1.0]), (plain, [100.0, 1.0])):
        _, state = optimizer.update(jnp.array(gradient), optimizer.init(jnp.zeros(2)))
        updates.append(optimizer.update(jnp.array([1.0, 1.0]), state)[0])
    assert np.array_equal(*updates)


def test_sizes_and_tau_are_the_published_ones_for_mnist():
    config = LogicConfig(dataset="mnist")
    assert (config.layers, config.gates, config.tau, config.batch_size) == (6, 8000, 10, 128)
    assert config.learning_rate == 0.05  # published: 0.01


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("layers", 0, "a whole number of at least 1"),
        ("gates", 2001, "a positive multiple of 10"),
        ("gates", 1000, "at least half of the 2352 bits of an example, or wiring 'random'"),
        ("tau", 0.0, "a finite number above 0"),
        ("levels", 0, "a whole number of at least 1"),
        ("wiring", "all", "one of unique, random, learned"),
        ("candidates", "some", "a value of type int or 'all' or None"),
        ("initialization", "zeros", "one of residual, normal"),
        ("parametrization", "fourier", "one of softmax, input_wise, walsh"),
        ("arity", 3, "one of 2, 4"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(field, value, wanted):
    with pytest.raises(UserError, match=f"^{field} is {value!r}; wants {wanted}"):
        LogicConfig(**{field: value})


def test_gates_of_four_inputs_read_two_pairs_and_have_tables():
    config = LogicConfig(arity=4, layers=2, gates=600)
    assert (config.parametrization, config.wiring) == ("input_wise", "unique")
    layers = config.network(jax.random.key(0)).layers
    assert [(layer.wires.get_value().gates, layer.logits.shape) for layer in layers] == [(1200, (600, 16))] * 2
    with pytest.raises(UserError, match=r"^gates is 500; wants at least a quarter of the 2352 bits of an example"):
        LogicConfig(arity=4, gates=500)
    with pytest.raises(UserError, match=r"^parametrization is 'softmax'; wants one of input_wise, walsh with arity 4"):
        LogicConfig(arity=4, parametrization="softmax")


def test_candidates_need_learned_wires():
    assert LogicConfig(candidates=4).wiring == "learned" and LogicConfig().candidates is None
    with pytest.raises(UserError, match=r"^candidates is 4; wants none with wiring 'unique', or wiring 'learned'"):
        LogicConfig(candidates=4, wiring="unique")
    assert LogicConfig(candidates=16, wiring="unique").wiring == "unique"  # earlier runs stored the default


def test_learned_wires_may_leave_bits_unread_but_have_no_more_candidates_than_bits():
    config = LogicConfig(wiring="learned", layers=2, gates=1000)
    layers = config.network(jax.random.key(0)).layers
    assert [(layer.wires.get_value().inputs, layer.wires.get_value().choices) for layer in layers] == [
        (2352, 16),
        (1000, 16),
    ]
    for candidates in (0, 30):
        wanted = rf"^candidates is {candidates}; wants 'all', or from 1 to 10, the number of bits"
        with pytest.raises(UserError, match=wanted):
            LogicConfig(wiring="learned", gates=10, candidates=candidates)


def shapes(config, images):
    found = []

    def build(key):
        model, _ = config.build(key)
        x = config.bits(images)
        for layer in model.convolutions:
            x = layer(x)
            found.append(x.shape[1:])
        found.append([layer.logits.shape[0] for layer in model.head.layers])
        return x

    jax.eval_shape(build, jax.random.key(0))
    return found


def test_the_network_for_mnist_is_as_its_docstring_says():
    config = LogicConvConfig(dataset="mnist", kernels=4)
    *images, widths = shapes(config, jnp.zeros((1, 1, 28, 28)))
    assert images == [(4, 12, 12), (12, 5, 5), (36, 3, 3)]
    assert widths == [4 * 1280, 4 * 640, 4 * 320]


def test_the_network_for_cifar_10_ends_in_2_x_2_places():
    config = LogicConvConfig(dataset="cifar10", kernels=2)
    *images, _ = shapes(config, jnp.zeros((1, 3, 32, 32)))
    assert images == [(2, 16, 16), (8, 8, 8), (32, 4, 4), (64, 2, 2)]
    assert (config.levels, config.weight_decay, config.learning_rate, config.batch_size) == (3, 0.002, 0.02, 128)


@pytest.mark.parametrize(
    ("size", "gates", "pools"), [("s", 143_024, 10_512), ("m", 572_096, 42_048), ("l", 1_179_948, 86_724)]
)
def test_the_placed_gates_of_mnists_sizes_are_those_of_the_docstring(size, gates, pools):
    text, k = logic.__doc__, LogicConvConfig(dataset="mnist", size=size).kernels
    assert (8939 * k, 657 * k) == (gates, pools)
    assert f"{gates:,}" in text and f"{pools:,}" in text and f"{k})" in text


def test_placed_gates_are_8939_and_657_of_the_pools_for_each_k():
    model, _ = LogicConvConfig(dataset="mnist", kernels=1).build(jax.random.key(0))
    circuit = model.harden()
    assert isinstance(circuit, ConvolutionalCircuit) and circuit.placed_gates == 8939 + 657


def test_every_dataset_has_three_sizes_that_make_settings():
    for dataset, architecture in ARCHITECTURES.items():
        configs = [LogicConvConfig(dataset=dataset, size=size) for size in ("s", "m", "l")]
        assert [config.kernels for config in configs] == sorted({size.kernels for size in architecture.sizes.values()})
        assert all(config.tau > 0 and config.epochs > 0 for config in configs)


def test_what_is_asked_for_goes_before_the_sizes():
    config = LogicConvConfig(dataset="mnist", size="m", tau=3.0, levels=2, shift=0, weight_decay=0.5, batch_size=7)
    assert (config.tau, config.levels, config.shift, config.weight_decay, config.batch_size) == (3.0, 2, 0, 0.5, 7)
    assert config.kernels == 64


def test_bits_are_thresholds_of_each_channel():
    images = jnp.asarray(np.random.default_rng(0).random((2, 3, 32, 32)), jnp.float32)
    bits = LogicConvConfig(dataset="cifar10", levels=3).bits(images)
    assert bits.shape == (2, 9, 32, 32)
    assert (bits[:, 4] == (images[:, 1] > 0.5)).all()


def test_the_evaluation_is_hardened():
    config = LogicConvConfig(kernels=1, initialization="normal")
    model, loss = config.build(jax.random.key(0))
    images, labels = jnp.asarray(np.random.default_rng(0).random((2, 1, 28, 28)), jnp.float32), jnp.array([1, 2])
    hard = nnx.jit(config.evaluation(loss))(model, images, labels)[0]
    scores = model.harden()(np.asarray(config.bits(images)) > 0).reshape(2, 10, -1).sum(axis=-1) / config.tau
    wanted = np.log(np.exp(scores).sum(axis=-1)) - scores[[0, 1], [1, 2]]
    np.testing.assert_allclose(hard, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("size", "xl", "one of s, m, l"),
        ("kernels", 0, "a whole number of at least 1"),
        ("tau", 0.0, "a finite number above 0"),
        ("levels", 0, "a whole number of at least 1"),
        ("weight_decay", -1.0, "a finite number of at least 0"),
        ("residual_logit", 0.0, "a finite number above 0"),
        ("shift", 28, "a whole number from 0 to 27"),
        ("dataset", "cifar", "one of digits, mnist, fashion_mnist, cifar10"),
        ("initialization", "zeros", "one of residual, normal"),
        ("parametrization", "fourier", "one of softmax, input_wise, walsh"),
    ],
)
def test_settings_that_no_convolutional_run_can_have_are_refused(field, value, wanted):
    with pytest.raises(UserError, match=f"^{field} is {value!r}; wants {wanted}"):
        LogicConvConfig(**{field: value})


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 9, 20)])
def test_own_images_of_every_size_have_a_network(tmp_path, shape):
    images, labels = np.random.default_rng(0).random((60, *shape), np.float32), np.arange(60) % 7
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels)
    config = LogicConvConfig(data=tmp_path / "own.npz", kernels=1)
    model, _ = config.build(jax.random.key(0))
    assert jax.eval_shape(lambda x: model(config.bits(x)), images[:2]).shape == (2, 7)
    assert config.widths[-1] % 7 == 0 and config.tau == np.sqrt(config.widths[-1] / 28)


@pytest.fixture
def own_table(tmp_path):
    path, rows = tmp_path / "own.csv", np.random.default_rng(0).random((50, 3))
    lines = [f"{a},{b},{c > 0.5},{i % 3}" for i, (a, b, c) in enumerate(rows)]
    path.write_text("\n".join(["a,b,c,class", *lines]).replace("True", "1").replace("False", "0"))
    return path


def test_a_table_becomes_bits_and_the_gates_a_multiple_of_the_classes(own_table):
    config = LogicConfig(data=own_table, target="class")
    assert (config.shape, config.inputs, config.classes, config.gates, config.levels) == ((31,), 31, 3, 2001, 15)
    assert config.wiring == "random" and LogicConfig(data=own_table, target="class", gates=300).wiring == "unique"
    dataset = config.load()
    assert dataset.test_images.shape == (9, 31) and np.array_equal(config.bits(dataset.test_images), dataset[2])
    settings = dict(data=own_table, target="class")
    cases = {
        "shift is 1; wants 0, because the data are no images": settings | dict(shift=1),
        "flip is True; wants False, because the data are no images": settings | dict(flip=True),
        "gates is 600; wants at most 465, for the 465 pairs of 31 bits": settings | dict(gates=600, wiring="unique"),
        "gates is 300; wants at most 232, for the 465 pairs": settings | dict(gates=300, wiring="unique", arity=4),
        "target is 'class'; wants no column, or data as well": dict(target="class"),
        "categorical_features is \\('a',\\); wants no column, or data as well": dict(categorical_features=("a",)),
        "categorical_features is 'd', which is no column": settings | dict(categorical_features=("d",)),
        "gates is 2000; wants a positive multiple of 3": settings | dict(gates=2000),
    }
    for message, wrong in cases.items():
        with pytest.raises(UserError, match=message):
            LogicConfig(**wrong)


def test_the_categories_of_a_table_are_settings_that_its_data_must_have(own_table):
    config = LogicConfig(data=own_table, target="class", categorical_features=("c", "class"))
    assert config.categories == (("c", ("0", "1")), ("class", ("0", "1", "2")))
    assert config.inputs == 32 and from_dict(LogicConfig, to_dict(config)) == config
    own_table.write_text(own_table.read_text().replace(",2\n", ",two\n"))
    with pytest.raises(UserError, match=r"own.csv has the categories .*'two'.*; wants .*'2'.*, as in the run"):
        config.load()


@pytest.mark.parametrize("field", ["classes", "batch_size", "layers", "gates", "levels"])
def test_the_settings_of_a_saved_run_are_complete(field):
    saved = dict(data=Path("own.npz"), shape=(1, 8, 8), classes=2, batch_size=8, epochs=1, learning_rate=0.1)
    saved |= dict(layers=2, gates=200, levels=3)
    assert LogicConfig(**saved).wiring == "unique"
    with pytest.raises(UserError, match=f"{field} is None; wants a value"):
        LogicConfig(**saved | {field: None})


def test_own_images_have_gates_for_all_bits(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x_train=np.zeros((60, 3, 40, 40), np.uint8), y_train=np.arange(60) % 7)
    config = LogicConfig(data=path)
    assert config.inputs == 3 * 3 * 40 * 40 and config.gates == 7203 and config.wiring == "unique"

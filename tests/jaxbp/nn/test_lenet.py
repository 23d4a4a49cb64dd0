import collections
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import ours, relative_error

import jaxbp
from jaxbp.nn import LeNet, lenet_memory_table, lenet_saved_tensors
from jaxbp.nn.lenet import Conv2d, Linear, MemoryRow
from jaxbp.ops.dense import mlp_softmax_cross_entropy as mlp

every_implementation = pytest.mark.parametrize("implementation", jaxbp.IMPLEMENTATIONS)
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])

SAVED = {
    "conv1.input": ((1, 28, 28), "float32"),
    "pool1.input": ((6, 24, 24), "float32"),
    "pool1.indices": ((6, 12, 12), "uint8"),
    "conv2.input": ((6, 12, 12), "float32"),
    "pool2.input": ((16, 8, 8), "float32"),
    "pool2.indices": ((16, 4, 4), "uint8"),
    "fc1.input": ((256,), "float32"),
    "fc2.input": ((120,), "float32"),
    "fc3.input": ((84,), "float32"),
    "logits": ((10,), "float32"),
}
SAVED_FUSED = {
    "conv1.input": ((1, 28, 28), "float32"),
    "pool1.indices": ((6, 12, 12), "uint8"),
    "conv2.input": ((6, 12, 12), "float32"),
    "pool2.indices": ((16, 4, 4), "uint8"),
    "fc1.input": ((256,), "float32"),
    "fc2.input": ((120,), "float32"),
    "fc3.input": ((84,), "float32"),
    "logits": ((10,), "float32"),
}
PARAMETERS = {
    "conv1.weight": (6, 1, 5, 5),
    "conv1.bias": (6,),
    "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,),
    "fc1.weight": (120, 256),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}
CHAIN = (
    {"logits"},
    {"fc3.weight", "fc3.bias", "fc3.input"},
    {"fc2.pre_relu"},
    {"fc2.weight", "fc2.bias", "fc2.input"},
    {"fc1.pre_relu"},
    {"fc1.weight", "fc1.bias", "fc1.input"},
    {"pool2.input"},
    {"conv2.pre_relu"},
    {"conv2.weight", "conv2.bias", "conv2.input"},
    {"pool1.input"},
    {"conv1.pre_relu"},
    {"conv1.weight", "conv1.bias"},
)


def build(implementation="xla", dtype=jnp.float32, fused=False):
    return LeNet(fused=fused, implementation=implementation, dtype=dtype, rngs=nnx.Rngs(0))


def lenet(implementation="xla", dtype=jnp.float32, fused=False):
    graph, parameters = nnx.split(build(implementation, dtype, fused))

    def logits(parameters, images):
        return nnx.merge(graph, parameters)(images)

    def losses(parameters, images, labels):
        return nnx.merge(graph, parameters).loss(images, labels)[0]

    return logits, losses, parameters


def mean_loss(implementation="xla", dtype=jnp.float32, fused=False):
    _, losses, parameters = lenet(implementation, dtype, fused)
    return lambda *arguments: jnp.mean(losses(*arguments)), parameters


def draw(batch=2):
    return jax.random.uniform(jax.random.key(1), (batch, 1, 28, 28), jnp.float32), jnp.arange(batch) % 10


def by_name(parameters):
    layers = nnx.to_pure_dict(parameters)
    return {f"{layer}.{name}": a for layer, arrays in layers.items() for name, a in arrays.items()}


def struct(a):
    return tuple(a.shape), jnp.dtype(a.dtype).name


def test_it_has_44426_parameters():
    parameters = by_name(lenet()[2])
    assert {name: a.shape for name, a in parameters.items()} == PARAMETERS
    assert sum(a.size for a in parameters.values()) == 44_426


@pytest.mark.parametrize("batch", [1, 5])
def test_logits_have_a_row_an_image(batch):
    logits, _, parameters = lenet()
    assert logits(parameters, draw(batch)[0]).shape == (batch, 10)


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 3, 28, 28), (2, 1, 32, 32), (2, 28, 28, 1)])
def test_images_of_another_shape_are_refused(shape):
    logits, _, parameters = lenet()
    message = f"LeNet: images has shape {shape}; wants (batch, 1, 28, 28)"
    with pytest.raises(ValueError, match=re.escape(message)):
        logits(parameters, jnp.zeros(shape))


@fused_or_not
@every_implementation
def test_the_loss_is_the_softmax_cross_entropy_of_the_logits_and_comes_with_the_likeliest_classes(
    implementation, fused
):
    model, (images, labels) = build(implementation, fused=fused), draw(3)
    loss, classes = model.loss(images, labels)
    logits = model(images)
    assert relative_error(loss, jaxbp.softmax_cross_entropy(logits, labels)) < 1e-5
    np.testing.assert_array_equal(classes, jnp.argmax(logits, axis=-1))
    assert classes.dtype == jnp.int32


@every_implementation
def test_in_bfloat16_logits_are_bfloat16_and_parameters_and_gradients_stay_float32(implementation):
    logits, _, parameters = lenet(implementation, jnp.bfloat16)
    images, labels = draw()
    assert jax.eval_shape(logits, parameters, images).dtype == jnp.bfloat16
    gradients = jax.eval_shape(jax.grad(mean_loss(implementation, jnp.bfloat16)[0]), parameters, images, labels)
    assert {a.dtype.name for a in (*by_name(parameters).values(), *by_name(gradients).values())} == {"float32"}


CASES = {
    f"{name}-fused" if fused else name: (name, fused)
    for name in jaxbp.IMPLEMENTATIONS
    for fused in (False, True)
    # LeNet's interpreted kernels would take 0.8 GiB to compile.
    if name != "pallas" or jax.default_backend() == "gpu"
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id=id) for id, case in CASES.items()],
)
def two_steps(request):
    implementation, fused = request.param
    loss, parameters = mean_loss(implementation, fused=fused)

    @jax.jit
    def step(parameters, images, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, images, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value, gradients

    with jax.default_matmul_precision("highest"):
        after, first_loss, gradients = step(parameters, *draw())
        _, second_loss, _ = step(after, *draw())
    return first_loss, by_name(gradients), second_loss


@functools.cache
def in_float64():
    loss, parameters = mean_loss("autodiff", jnp.float64)
    images, labels = draw()
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        parameters, images = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (parameters, images))
        value, gradients = jax.jit(jax.value_and_grad(loss))(parameters, images, np.asarray(labels))
    return value, by_name(gradients)


def test_loss_and_all_gradients_agree_with_float64(two_steps):
    value, gradients, _ = two_steps
    expected, expected_gradients = in_float64()
    assert expected.dtype == jnp.float64
    assert relative_error(value, expected) < 1e-5
    errors = {name: relative_error(gradients[name], g) for name, g in expected_gradients.items()}
    assert errors.keys() == PARAMETERS.keys()
    assert max(errors.values()) < 1e-5, errors


def test_a_step_of_gradient_descent_lowers_the_loss(two_steps):
    first_loss, _, second_loss = two_steps
    assert second_loss < first_loss


def rows(kind, batch=32, fused=False):
    return {row.name: row for row in lenet_memory_table(batch, fused=fused) if row.kind == kind}


def size(table):
    return sum(math.prod(row.shape) for row in table.values())


@pytest.mark.parametrize(("fused", "saved", "size"), [(False, SAVED, 880_384), (True, SAVED_FUSED, 306_944)])
def test_the_table_has_the_tensors_kept_for_the_backward(fused, saved, size):
    table = rows("saved", fused=fused)
    assert table == {name: MemoryRow("saved", name, (32, *shape), dtype) for name, (shape, dtype) in saved.items()}
    assert sum(row.bytes for row in table.values()) == size


@pytest.mark.parametrize(("fused", "values"), [(False, 335_936), (True, 42_688)])
def test_the_table_has_the_activation_gradients_of_the_chain(fused, values):
    table = rows("activation gradient", fused=fused)
    assert size(table) == values
    assert sum(row.bytes for row in table.values()) == 4 * values


@fused_or_not
def test_the_table_has_44426_values_of_parameter_gradients(fused):
    table = rows("parameter gradient", fused=fused)
    assert {name: row.shape for name, row in table.items()} == PARAMETERS
    assert size(table) == 44_426
    assert sum(row.bytes for row in table.values()) == 4 * 44_426


@fused_or_not
def test_saved_tensors_are_those_of_the_table(fused):
    _, saved = lenet_saved_tensors(build(fused=fused), *draw(32))
    assert {name: (*struct(a), a.nbytes) for name, a in saved.items()} == {
        name: (row.shape, row.dtype, row.bytes) for name, row in rows("saved", fused=fused).items()
    }


@fused_or_not
def test_saved_tensors_come_with_the_models_loss(fused):
    _, losses, parameters = lenet(fused=fused)
    assert relative_error(lenet_saved_tensors(build(fused=fused), *draw())[0], losses(parameters, *draw())) < 1e-6


@fused_or_not
@ours
def test_the_backward_keeps_the_tables_tensors_and_nothing_else(implementation, fused):
    _, losses, parameters = lenet(implementation, fused=fused)
    images, labels = draw(3)
    backward = jax.eval_shape(lambda p: jax.vjp(lambda p: losses(p, images, labels), p)[1], parameters)
    kept = collections.Counter(map(struct, jax.tree.leaves(backward)))
    kept -= collections.Counter(map(struct, [*jax.tree.leaves(parameters), labels]))
    if implementation == "pallas" and not fused:  # maximum and sum of exponentials per row of logits
        kept -= collections.Counter({((3,), "float32"): 2})
    assert kept == collections.Counter((row.shape, row.dtype) for row in rows("saved", 3, fused).values())


@fused_or_not
def test_activation_gradients_are_those_of_the_table(fused):
    options = dict(implementation="xla")
    model = build(**options, fused=fused)
    images, labels = draw(3)
    stages = _stages(model, labels, **options)

    @jax.jit
    def stage_by_stage(images):
        x, backwards = images, {}
        for name, stage in stages.items():
            x, backwards[name] = jax.vjp(stage, x)
        gradients, dy = [], jnp.ones_like(x)
        for backward in reversed(backwards.values()):
            (dy,) = backward(dy)
            gradients.append(dy)
        return gradients, jax.grad(lambda images: model.loss(images, labels)[0].sum())(images)

    gradients, whole = stage_by_stage(images)
    gradients = dict(zip(reversed(stages), gradients, strict=True))
    assert relative_error(gradients.pop("conv1.input"), whole) < 1e-6
    if fused:
        gradients = _gradients_within_the_dense_layers(model, images, labels) | gradients
    assert [(name, *struct(a)) for name, a in gradients.items()] == [
        (name, row.shape, row.dtype) for name, row in rows("activation gradient", 3, fused).items()
    ]


def _gradients_within_the_dense_layers(model, images, labels):
    loss, saved = lenet_saved_tensors(model, images, labels)
    hidden = saved["fc2.input"], saved["fc3.input"]
    weights = [fc.parameters()[0] for fc in (model.fc1, model.fc2, model.fc3)]
    gradients = mlp.row_gradients(jnp.ones_like(loss), labels, saved["logits"], hidden, weights)
    return dict(zip(("logits", "fc2.pre_relu", "fc1.pre_relu"), gradients, strict=False))


def _stages(model, labels, **options):
    relu = functools.partial(jaxbp.relu, **options)
    pool = functools.partial(jaxbp.max_pool2d, window=2, **options)

    def block(x, conv):
        return jaxbp.conv2d_relu_max_pool2d(x, *conv.parameters(), window=2, **options)

    if model.fused:
        layers = [a for fc in (model.fc1, model.fc2, model.fc3) for a in fc.parameters()]
        return {
            "conv1.input": lambda x: block(x, model.conv1),
            "conv2.input": lambda x: jaxbp.flatten(block(x, model.conv2)),
            "fc1.input": lambda x: jaxbp.mlp_softmax_cross_entropy(x, labels, *layers, **options),
        }
    return {
        "conv1.input": model.conv1,
        "conv1.pre_relu": relu,
        "pool1.input": pool,
        "conv2.input": model.conv2,
        "conv2.pre_relu": relu,
        "pool2.input": lambda x: jaxbp.flatten(pool(x)),
        "fc1.input": model.fc1,
        "fc1.pre_relu": relu,
        "fc2.input": model.fc2,
        "fc2.pre_relu": relu,
        "fc3.input": model.fc3,
        "logits": lambda x: jaxbp.softmax_cross_entropy(x, labels, **options),
    }


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_without_images_is_refused(batch):
    with pytest.raises(ValueError, match=f"lenet_memory_table: batch is {batch}; wants at least 1"):
        lenet_memory_table(batch)


BATCH = 128
"""A multiple of a warpgroup's threads, which needs no padding."""

RESULTS = {
    "softmax_cross_entropy_backward": r"logits",
    "linear_backward": r"fc\d\.(weight|bias|input)",
    "relu_backward": r".*\.pre_relu",
    "max_pool2d_backward": r"pool\d\.input",
    "conv2d_backward_weights": r"conv\d\.weight",
    "conv2d_backward_bias": r"conv\d\.bias",
    "conv2d_backward_input": r"conv\d\.input",
}


def steps_of_the_backward(program):
    """Yield (scope, result size) of each kernel."""
    scopes = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', program, re.MULTILINE))
    step = re.compile(r"@mosaic_gpu.* -> \(?tensor<([\dx]+)xf32>.* loc\((#loc\d+)\)$", re.MULTILINE)
    for shape, location in step.findall(program):
        if "transpose(" in scopes[location]:
            yield scopes[location], math.prod(map(int, shape.split("x")))


def named(scope, size):
    names = [re.sub(r"^jvp\((\w+)\)$", r"\1", name) for name in scope.split("/")]
    op = next(op for op in reversed(names) if op in RESULTS)
    sizes = {row.name: math.prod(row.shape) for row in lenet_memory_table(BATCH) if row.kind != "saved"}
    sizes["conv1.input"] = BATCH * 28 * 28
    fitting = [name for name, each in sizes.items() if re.fullmatch(RESULTS[op], name) and size % each == 0]
    return max(fitting, key=sizes.get)


def test_the_backward_is_the_chain_of_21_steps():
    loss, parameters = mean_loss("pallas")
    lowered = jax.jit(jax.grad(loss)).trace(parameters, *draw(BATCH)).lower(lowering_platforms=("cuda",))
    chain = [named(*step) for step in steps_of_the_backward(lowered.as_text(debug_info=True))]
    assert len(chain) == 21
    done = iter(chain)
    assert [set(itertools.islice(done, len(stage))) for stage in CHAIN] == list(CHAIN)


@pytest.mark.parametrize(("argument", "present"), [("parameters", False), ("images", True)])
def test_the_gradient_in_the_images_is_computed_only_when_asked_for(argument, present):
    with jax.default_device(jax.devices("cpu")[0]):
        loss, parameters = mean_loss("xla")
        gradient = jax.jit(jax.grad(loss, ("parameters", "images").index(argument)))
        program = gradient.lower(parameters, *draw(3)).compile().as_text()
    in_scope = [line for line in program.splitlines() if "/conv2d_backward_input/" in line]
    assert any("[3,6,12,12]" in line for line in in_scope)
    assert any("[3,1,28,28]" in line for line in in_scope) == present


def test_the_number_of_logits_is_a_choice():
    model = nnx.eval_shape(lambda: LeNet(classes=3, rngs=nnx.Rngs(0)))
    assert jax.eval_shape(lambda model, x: model(x), model, jnp.zeros((2, 1, 28, 28))).shape == (2, 3)
    with pytest.raises(ValueError, match="LeNet: classes is 0; wants an int of at least 1"):
        LeNet(classes=0, rngs=nnx.Rngs(0))


def test_weights_are_uniform_by_the_inputs_of_an_output():
    rngs = nnx.Rngs(0)
    for layer, fan_in in ((Linear(400, 50, rngs=rngs), 400), (Conv2d(4, 30, (5, 2), rngs=rngs), 40)):
        weight, bias, largest = np.asarray(layer.weight[...]), np.asarray(layer.bias[...]), fan_in**-0.5
        assert np.abs(weight).max() < largest and np.abs(bias).max() < largest
        np.testing.assert_allclose(weight.std(), largest / 3**0.5, rtol=0.1)


X = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)


def test_a_layer_is_its_op_with_its_parameters_and_options():
    conv = Conv2d(1, 2, (2, 3), implementation="xla", rngs=nnx.Rngs(2))
    images = X.reshape(1, 1, 3, 4)
    expected = jaxbp.conv2d(images, *conv.parameters(), implementation="xla")
    np.testing.assert_array_equal(conv(images), expected)


def test_what_is_computed_in_half_precision_keeps_its_parameters():
    layer = Linear(6, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert (layer(X).dtype, layer.weight[...].dtype) == (jnp.bfloat16, jnp.float32)


def test_an_unknown_implementation_reaches_the_op():
    with pytest.raises(ValueError, match="linear: implementation is 'cuda'"):
        Linear(6, 3, implementation="cuda", rngs=nnx.Rngs(0))(X)

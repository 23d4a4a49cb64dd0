import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import LAYERS, ROWS, assert_layers_agree, make, state_of
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxbp

every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
@pytest.mark.parametrize(("implementation", "dtype"), [("xla", None), ("pallas", jnp.bfloat16)])
def test_values_and_gradients_are_those_of_flax(name, implementation, dtype):
    x, tolerance = LAYERS[name][1], 1e-5 if dtype is None else 2e-2
    if name == "Dropout":
        assert_layers_agree(name, x=x.astype(dtype or x.dtype), tolerance=tolerance, implementation=implementation)
    else:
        assert_layers_agree(name, tolerance=tolerance, implementation=implementation, dtype=dtype)


@every_layer
def test_constructors_have_the_arguments_of_flax_and_an_implementation(name):
    parameters = list(inspect.signature(getattr(jaxbp.nnx, name)).parameters.values())
    _, *wanted = inspect.signature(getattr(nnx, name).__init__).parameters.values()
    implementation = next(parameter for parameter in parameters if parameter not in wanted)
    assert [parameter for parameter in parameters if parameter is not implementation] == wanted
    assert (implementation.name, implementation.kind, implementation.default) == (
        "implementation",
        inspect.Parameter.KEYWORD_ONLY,
        None,
    )


def test_a_subclass_has_the_arguments_of_its_constructor():
    class Wide(jaxbp.nnx.Linear):
        def __init__(self, width, rngs):
            super().__init__(width, 4 * width, rngs=rngs)

    class Scaled(jaxbp.nnx.Linear):
        def __init__(self, *args, scale=1.0, **options):
            super().__init__(*args, **options)

    assert list(inspect.signature(Wide).parameters) == ["width", "rngs"]
    assert Wide(6, nnx.Rngs(0))(ROWS).shape == (2, 3, 24)
    parameters = list(inspect.signature(jaxbp.nnx.Linear).parameters)
    assert list(inspect.signature(Scaled).parameters) == [*parameters[:-1], "scale", "implementation"]


@every_layer
def test_a_layer_is_a_layer_of_flax_with_the_same_variables(name):
    ours, twin = make(jaxbp.nnx, name), make(nnx, name)
    assert isinstance(ours, getattr(nnx, name))
    variables, wanted = state_of(ours), state_of(twin)
    assert {path: a.dtype for path, a in variables.items()} == {path: a.dtype for path, a in wanted.items()}
    jax.tree.map(np.testing.assert_array_equal, variables, wanted)


@every_layer
def test_a_state_of_flax_loads_and_the_other_way_round(name):
    ours, twin = make(jaxbp.nnx, name), make(nnx, name, seed=2)
    nnx.update(ours, nnx.state(twin))
    jax.tree.map(np.testing.assert_array_equal, state_of(ours), state_of(twin))
    ours = make(jaxbp.nnx, name)
    nnx.update(twin, nnx.state(ours))
    jax.tree.map(np.testing.assert_array_equal, state_of(ours), state_of(twin))


@every_layer
def test_metadata_of_parameters_stays(name):
    options = [key for key in inspect.signature(getattr(jaxbp.nnx, name)).parameters if key.endswith("_metadata")]
    ours, twin = (
        nnx.to_flat_state(nnx.state(make(module, name, **{key: {"role": key} for key in options}), nnx.Param))
        for module in (jaxbp.nnx, nnx)
    )
    roles = {path: variable.get_metadata("role", None) for path, variable in ours}
    assert roles == {path: variable.get_metadata("role", None) for path, variable in twin}
    assert any(roles.values()) == bool(options)


@every_layer
def test_pickling_and_copying_keep_the_layer_and_its_implementation(name):
    layer = make(jaxbp.nnx, name, implementation="xla")
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), nnx.clone(layer)):
        assert (type(other), other.implementation) == (type(layer), "xla")
        jax.tree.map(np.testing.assert_array_equal, state_of(other), state_of(layer))


@every_layer
def test_the_implementation_reaches_the_op(name):
    x = LAYERS[name][1]
    options = {"dtype": jnp.bfloat16} if name == "MultiHeadAttention" else {}  # its kernels take half precision
    scopes = {}
    for implementation in jaxbp.IMPLEMENTATIONS:
        graph, state = nnx.split(make(jaxbp.nnx, name, implementation=implementation, **options))
        lowered = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, x)
        text = lowered.as_text(debug_info=True)
        scopes[implementation] = {one for one in jaxbp.IMPLEMENTATIONS if f"/{one}/" in text}
    assert all(implementation in found for implementation, found in scopes.items())
    assert "xla" not in scopes["autodiff"] and "pallas" not in scopes["xla"] and "xla" not in scopes["pallas"]


@every_layer
def test_the_implementation_is_a_static_attribute(name):
    graphs = {nnx.graphdef(make(jaxbp.nnx, name, implementation=one)) for one in (None, "xla", "xla")}
    assert len(graphs) == 2


@every_layer
def test_an_unknown_implementation_is_an_error(name):
    with pytest.raises(ValueError, match=f"^{name}: implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff'"):
        make(jaxbp.nnx, name, implementation="cuda")


class Block(nnx.Module):
    def __init__(self, module, rngs):
        self.norm = module.LayerNorm(6, rngs=rngs)
        self.linear = module.Linear(6, 6, rngs=rngs)
        self.dropout = module.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.linear(self.norm(x)))


def stacked(module, keys=3):
    @nnx.split_rngs(splits=keys)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return Block(module, rngs)

    return create(nnx.Rngs(0))


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
@nnx.remat
def scan_over_layers(block, x):
    return block(x)


@nnx.vmap(in_axes=(0, None))
def ensemble(block, x):
    return block(x)


@pytest.mark.parametrize("apply", [scan_over_layers, ensemble], ids=["scan", "vmap"])
def test_transformations_give_the_losses_and_gradients_of_flax(apply):
    step = nnx.jit(nnx.value_and_grad(lambda blocks, x: jnp.sum(jnp.sin(apply(blocks, x)))))
    results = [step(stacked(module), ROWS) for module in (jaxbp.nnx, nnx)]
    assert_close(*results, 1e-5)


def test_a_sharded_layer_has_the_results_and_shardings_of_flax():
    mesh = jax.make_mesh((4, 2), ("examples", "features"), axis_types=(AxisType.Explicit,) * 2)
    step = nnx.jit(nnx.value_and_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x)))))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(48.0).reshape(8, 6) / 9, NamedSharding(mesh, PartitionSpec("examples")))
        metadata = dict(kernel_metadata={"out_sharding": (None, "features")})
        results = [step(make(module, "Linear", **metadata), x) for module in (jaxbp.nnx, nnx)]
    assert_close(*results, 1e-5)
    ours, twin = ([a.sharding.spec for a in jax.tree.leaves(result)] for result in results)
    assert ours == twin and PartitionSpec(None, "features") in ours


@pytest.mark.parametrize("name", ["Linear", "Conv"])
def test_the_precision_reaches_the_products(name):
    graph, state = nnx.split(make(jaxbp.nnx, name, precision="high"))
    loss = jax.grad(lambda state, x: jnp.sum(nnx.merge(graph, state)(x)))
    text = jax.jit(loss).lower(state, LAYERS[name][1]).as_text()
    assert "HIGH" in text and "HIGHEST" not in text and "DEFAULT" not in text


def test_train_and_eval_switch_dropout_and_batch_norm():
    class Model(nnx.Module):
        def __init__(self, module, rngs):
            self.norm, self.dropout = module.BatchNorm(6, rngs=rngs), module.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    ours, twin = Model(jaxbp.nnx, nnx.Rngs(0)), Model(nnx, nnx.Rngs(0))
    for set_mode in (nnx.Module.eval, nnx.Module.train, nnx.Module.eval):
        results = []
        for model in (ours, twin):
            set_mode(model)
            results.append((model(ROWS), state_of(model.norm)))
        assert_close(*results, 1e-5)


def test_shapes_are_known_without_computing():
    layer = nnx.eval_shape(lambda: make(jaxbp.nnx, "Linear"))
    assert isinstance(layer, jaxbp.nnx.Linear)
    assert jax.tree.leaves(nnx.state(layer)) == [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4,), (6, 4))]

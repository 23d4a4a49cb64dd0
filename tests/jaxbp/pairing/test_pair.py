import dataclasses
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import REMAT3_ALONE, assert_close, cuda_program, drawn, on_the_cpu, op_of
from jax.interpreters import partial_eval as pe
from jax.test_util import check_grads

import jaxbp
from jaxbp import DefaultImplementation, Op, Pair
from jaxbp.pairing import per_implementation
from jaxbp.pairing.op import REMEMBERED
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.pointwise.elementwise import elementwise

X = jnp.array([-1.5, 0.5, 2.0])


def cube(x):
    return x**3


def cube_gradient(dy, x):
    return 3 * x**2 * dy


FORMULA_ALONE = Pair(cube, {"xla": cube_gradient})
WITH_KERNEL = Pair(cube, {"xla": cube_gradient, "pallas": functools.partial(elementwise, cube_gradient)})
every_cube = pytest.mark.parametrize(
    ("pair", "implementation"),
    [(FORMULA_ALONE, "xla"), (FORMULA_ALONE, None), *((WITH_KERNEL, name) for name in (*jaxbp.IMPLEMENTATIONS, None))],
)


def total(pair, implementation):
    return lambda *arrays: jnp.sum(pair(*arrays, implementation=implementation))


@every_cube
def test_the_forward_is_the_function_itself(pair, implementation):
    assert_close(pair(X, implementation=implementation), X**3, "float32")


@every_cube
def test_gradients_of_order_1_2_and_3_are_right(pair, implementation):
    first = jax.grad(total(pair, implementation))
    second = jax.grad(lambda x: jnp.sum(first(x)))
    third = jax.grad(lambda x: jnp.sum(second(x)))
    assert_close(jax.jit(lambda x: (first(x), second(x), third(x)))(X), (3 * X**2, 6 * X, 6 + 0 * X), "float32")


@every_cube
def test_forward_mode_goes_over_the_backward(pair, implementation):
    product = jax.jit(lambda x, v: jax.jvp(jax.grad(total(pair, implementation)), (x,), (v,))[1])
    assert_close(product(X, X), 6 * X * X, "float32")


@pytest.mark.parametrize(("implementation", "times"), [("pallas", 20), ("xla", 10), ("autodiff", 1)])
def test_one_argument_picks_the_backward(implementation, times):
    wrong_on_purpose = {"pallas": lambda dy, x: 20 * dy, "xla": lambda dy, x: 10 * dy}
    pair = Pair(lambda x: 1 * x, wrong_on_purpose, name="identity")
    assert jax.grad(pair)(1.0, implementation=implementation) == times


def test_the_backward_is_an_op_of_its_own():
    assert_close(WITH_KERNEL.backward(X, X, implementation="pallas"), 3 * X**3, "float32")
    assert WITH_KERNEL.backward.name == "cube_backward"


def test_several_arrays_and_results_keep_their_order():
    def polar(r, angle):
        return {"x": r * jnp.cos(angle), "y": r * jnp.sin(angle)}

    def backward(dy, r, angle):
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return dy["x"] * cos + dy["y"] * sin, r * (dy["y"] * cos - dy["x"] * sin)

    pair = Pair(polar, {"xla": backward})
    arrays, cotangents = (X, X + 1), {"x": X, "y": 2 * X}
    assert_close(
        jax.vjp(functools.partial(pair, implementation="xla"), *arrays)[1](cotangents),
        jax.vjp(polar, *arrays)[1](cotangents),
        "float32",
    )


POWER = Pair(
    lambda x, *, power, scale: scale * x**power,
    {"xla": lambda dy, x, *, power, scale: scale * power * x ** (power - 1) * dy},
    name="power",
)


@pytest.mark.parametrize("options", [dict(power=2, scale=3.0), dict(scale=2.0, power=5)], ids=str)
def test_options_reach_the_forward_and_the_backward(options):
    gradients = [jax.grad(total(functools.partial(POWER, **options), name))(X) for name in ("xla", "autodiff")]
    assert_close(*gradients, "float32")


ADD_TO = Pair(
    lambda x, b: x * x if b is None else x * x + b,
    {"xla": lambda dy, x, b: (2 * x * dy, None if b is None else dy)},
    name="add_to",
)


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_an_array_may_be_none(implementation):
    gradient, of_none = jax.grad(total(ADD_TO, implementation), (0, 1))(X, None)
    assert_close(gradient, 2 * X, "float32")
    assert of_none is None


def test_an_array_without_a_gradient_gets_none_from_the_backward():
    take = Pair(lambda x, i: x[i], {"xla": lambda dy, x, i: (jnp.zeros_like(x).at[i].add(dy), None)}, name="take")
    np.testing.assert_array_equal(jax.grad(take)(X, jnp.int32(1)), [0, 1, 0])


def test_the_backward_gets_what_the_forward_saves():
    exp = Pair(jnp.exp, {"xla": lambda dy, y: dy * y}, save=lambda x: (jnp.exp(x), (jnp.exp(x),)))
    assert_close(jax.grad(total(exp, "xla"))(X), jnp.exp(X), "float32")


def test_each_implementation_may_save_something_else():
    save = {"xla": lambda x: (1 * x, (10.0,)), "pallas": lambda x: (1 * x, (20.0,))}
    pair = Pair(lambda x: 1 * x, dict.fromkeys(save, lambda dy, saved: saved * dy), save=save, name="identity")
    assert [float(jax.grad(pair)(1.0, implementation=name)) for name in save] == [10, 20]


def test_a_wrong_backward_is_found_by_check_grads():
    pair = Pair(cube, {"xla": lambda dy, x: 3.1 * x**2 * dy}, name="wrong")
    with pytest.raises(AssertionError):
        check_grads(functools.partial(pair, implementation="xla"), (X,), order=1, modes=("rev",), rtol=2e-2)


LACKING = [
    (FORMULA_ALONE, "pallas", "cube: has no implementation 'pallas'; wants one of 'xla', 'autodiff'"),
    (FORMULA_ALONE.backward, "autodiff", "cube_backward: has no implementation 'autodiff'; wants one of 'xla'"),
]


@pytest.mark.parametrize(("op", "implementation", "message"), LACKING)
def test_an_implementation_that_it_lacks_is_refused_with_those_it_has(op, implementation, message):
    assert isinstance(op, Op)
    with pytest.raises(NotImplementedError) as error:
        op(*(X, X)[: 2 if op is FORMULA_ALONE.backward else 1], implementation=implementation)
    assert str(error.value) == message


def counting(function, calls):
    def counted(*arrays, **options):
        calls.append(arrays)
        return function(*arrays, **options)

    return counted


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_jit_traces_the_forward_once(implementation):
    calls = []
    pair = Pair(counting(cube, calls), {"xla": cube_gradient})
    call = jax.jit(functools.partial(pair, implementation=implementation))
    call(X), call(X)
    assert len(calls) == 1


@pytest.mark.parametrize("implementation", ["pallas", "xla", None])
def test_without_jit_no_call_traces_the_forward(implementation):
    calls = []
    pair = Pair(counting(cube, calls), {"xla": cube_gradient, "pallas": cube_gradient})
    for _ in range(2):
        jax.grad(total(pair, implementation))(X)
    # With `jax_custom_vjp3`, JAX traces it once.
    assert sum(isinstance(x, jax.core.Tracer) for (x,) in calls) == getattr(jax.config, "jax_custom_vjp3", False)


def test_without_jit_a_second_call_does_not_trace_the_kernel_again():
    calls = []
    kernel = functools.partial(elementwise, counting(cube_gradient, calls))
    gradient = jax.grad(total(Pair(cube, {"xla": cube_gradient, "pallas": kernel}), "pallas"))
    gradient(X)
    traces = len(calls)
    gradient(X)
    assert len(calls) == traces


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff", None])
def test_with_jit_calls_outside_of_it_are_compiled_once_for_their_shapes_and_options(implementation):
    traces, backwards = [], []
    scaled = lambda x, *, k: k * cube(x)  # noqa: E731
    backward = counting(lambda dy, x, *, k: k * cube_gradient(dy, x), backwards)
    pair = Pair(counting(scaled, traces), {"xla": backward, "pallas": backward}, name="scaled", jit=True)
    call = functools.partial(pair, implementation=implementation)
    for k in (1, 1.0, True, 1, 1.0):
        y = call(X, k=k)
        assert_close(y, k * cube(X), "float32")
        assert y.dtype == X.dtype
        assert_close(pair.vjp(X, X, k=k, implementation=implementation), k * cube_gradient(X, X), "float32")
    call(np.ones((2, 3), np.float32), k=1), call(np.ones((2, 3), np.float32), k=1)
    assert len(traces) == (4 if implementation != "autodiff" else 7)
    assert all(isinstance(x, jax.core.Tracer) for (x, *_) in (*traces, *backwards))


def test_with_jit_it_is_no_different_under_transformations():
    pair = Pair(cube, {"xla": cube_gradient}, jit=True)
    assert_close(jax.jit(jax.vmap(jax.grad(pair)))(X), 3 * X**2, "float32")
    assert_close(jax.vmap(pair)(X), X**3, "float32")
    assert float(jax.grad(jax.grad(pair))(2.0)) == 12
    text = str(jax.make_jaxpr(pair)(X))
    assert text == str(jax.make_jaxpr(Pair(cube, {"xla": cube_gradient}))(X))


def test_with_jit_an_op_is_compiled_once_under_each_name():
    traces = []
    op = Op("cube", {"xla": counting(cube, traces)}, jit=True)
    for _ in range(3):
        assert_close(op.named("power")(X), X**3, "float32")
    assert len(traces) == 1


def test_with_jit_no_array_need_be_given():
    assert float(Op("two", {"xla": lambda *, k: jnp.float32(k)}, jit=True)(k=2)) == 2


def test_with_jit_wrong_arguments_have_the_same_errors():
    pair = Pair(lambda x, *, k: k * x, {"xla": lambda dy, x, *, k: k * dy}, name="scaled", jit=True)
    for renamed in (pair, pair.named("renamed")):
        with pytest.raises(ValueError, match=rf"^{renamed.name}: implementation is 'cuda'; wants"):
            renamed(X, k=1, implementation="cuda")
        with pytest.raises(ValueError, match=rf"^{renamed.name}: implementation is \['xla'\]; wants"):
            renamed(X, k=1, implementation=["xla"])
        with pytest.raises(TypeError, match=rf"^{renamed.name}: k is a list; wants a hashable value"):
            renamed(X, k=[1])


def test_the_implementation_is_part_of_jits_cache_key():
    pair = Pair(lambda x: 1 * x, {"xla": lambda dy, x: 10 * dy}, name="identity")
    gradient = jax.jit(jax.grad(pair), static_argnames="implementation")
    assert [float(gradient(1.0, implementation=name)) for name in ("xla", "autodiff", "xla")] == [10, 1, 10]


@every_cube
def test_vjp_takes_the_forwards_arguments(pair, implementation):
    assert_close(pair.vjp(2 * X, X, implementation=implementation), 6 * X**3, "float32")


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_vjp_of_a_forward_whose_arguments_are_kept_does_not_run_it(implementation):
    calls = []
    pair = Pair(counting(cube, calls), dict.fromkeys(("pallas", "xla"), cube_gradient))
    pair.vjp(X, X, implementation=implementation)
    assert calls == []


EXP = dict(save=lambda x: (jnp.exp(x), (jnp.exp(x),)), name="exp")


def test_vjp_gets_what_the_forward_saves():
    pair = Pair(jnp.exp, {"xla": lambda dy, y: dy * y}, **EXP)
    assert_close(pair.vjp(X, X, implementation="xla"), X * jnp.exp(X), "float32")


def test_without_save_the_residuals_are_saved():
    pair = Pair(lambda x, y: x * x + y, {"xla": lambda dy, x: (2 * x * dy, dy)}, residuals=lambda x, y: (x,))
    assert jax.grad(pair, (0, 1))(3.0, 2.0) == (6, 1)


def test_vjp_gets_the_residuals_where_they_are_made_without_the_forward():
    pair = Pair(jnp.exp, {"xla": lambda dy, y: dy * y}, residuals=lambda x: (10.0,), **EXP)
    assert_close(pair.vjp(X, X, implementation="xla"), 10 * X, "float32")
    assert_close(pair.vjp(X, X, implementation="autodiff"), X * jnp.exp(X), "float32")
    assert_close(jax.grad(total(pair, "xla"))(X), jnp.exp(X), "float32")


def spread(dy, *, shape):
    return jnp.broadcast_to(dy, shape)


SUM = Pair(lambda x, *, shape: jnp.sum(x), dict.fromkeys(("pallas", "xla"), spread), linear=True, name="total")


@pytest.mark.parametrize("implementation", [*jaxbp.IMPLEMENTATIONS, None])
def test_a_linear_forward_needs_no_more_than_dy_and_a_shape(implementation):
    found = SUM.vjp(jnp.float32(3), shape=(2, 2), implementation=implementation)
    np.testing.assert_array_equal(found, np.full((2, 2), 3))
    of_x = jax.grad(functools.partial(SUM, shape=(3,), implementation=implementation))(X)
    np.testing.assert_array_equal(of_x, np.ones(3))


WITH_AUX = Pair(
    lambda x: (x**3, jnp.argmax(x)), dict.fromkeys(("pallas", "xla"), cube_gradient), has_aux=True, name="with_aux"
)


@pytest.mark.parametrize("implementation", [*jaxbp.IMPLEMENTATIONS, None])
def test_of_a_forward_with_aux_dy_is_that_of_its_first_result(implementation):
    assert_close(WITH_AUX.vjp(X, X, implementation=implementation), 3 * X**3, "float32")
    loss = lambda x: (lambda y, place: (jnp.sum(y), place))(*WITH_AUX(x, implementation=implementation))  # noqa: E731
    gradient, place = jax.grad(loss, has_aux=True)(X)
    assert_close(gradient, 3 * X**2, "float32")
    assert place == 2


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_vjp_gives_the_gradients_of_floating_arrays_alone(implementation):
    add = functools.partial(ADD_TO.vjp, implementation=implementation)
    assert_close(add(X, X, X), (2 * X * X, X), "float32")
    assert_close(add(X, X, None), 2 * X * X, "float32")
    take = Pair(lambda x, i: x[i], {"xla": lambda dy, x, i: (jnp.zeros_like(x).at[i].add(dy), None)}, name="take")
    found = take.vjp(jnp.float32(5), X, jnp.int32(1), implementation=implementation)
    np.testing.assert_array_equal(found, [0, 5, 0])
    times = Pair(lambda x, a: x * a, {"xla": lambda dy, x, a: (dy * a, jnp.sum(dy * x))}, name="times")
    assert_close(times.vjp(X, X, 2.0, implementation=implementation), (2 * X, jnp.sum(X * X)), "float32")


def test_vjp_refuses_what_the_kernel_does_not_take_by_its_own_name():
    pair = Pair(
        cube,
        dict.fromkeys(("pallas", "xla"), cube_gradient),
        unsupported=lambda x: "three numbers" if x.size == 3 else "",
    )
    with pytest.raises(
        NotImplementedError, match=r"^cube_backward: implementation='pallas' does not take three numbers"
    ):
        pair.vjp(X, X, implementation="pallas")
    assert_close(pair.vjp(X[:2], X[:2], implementation="pallas"), 3 * X[:2] ** 3, "float32")


PART = Op("part", {"pallas": lambda x: x + 1, "xla": lambda x: x + 2, "autodiff": lambda x: x + 3})


def twice(x, *, implementation):
    return PART(PART(x, implementation=implementation), implementation=implementation)


def test_a_composed_function_hands_its_implementation_on():
    op = Op(
        "twice",
        {"autodiff": lambda x: x, **per_implementation(twice)},
        default=DefaultImplementation(elsewhere="autodiff"),
    )
    with on_the_cpu():
        assert [float(op(0.0, implementation=name)) for name in ("pallas", "xla", "autodiff", None)] == [2, 4, 0, 0]


def test_a_composed_function_may_leave_none_to_its_parts():
    op = Op(
        "twice", per_implementation(twice, ("pallas", "xla", None)), default=DefaultImplementation(elsewhere="pallas")
    )
    with on_the_cpu():
        assert [float(op(0.0, implementation=name)) for name in ("pallas", "xla", None)] == [2, 4, 4]
    with pytest.raises(NotImplementedError, match=r"^twice: has no implementation 'autodiff'"):
        op(0.0, implementation="autodiff")


def test_an_op_and_a_pair_say_their_names_and_implementations():
    assert repr(WITH_KERNEL) == "Pair(cube: xla, pallas, autodiff)"
    assert repr(WITH_KERNEL.backward) == "Op(cube_backward: xla, pallas)"
    assert repr(Op("twice", per_implementation(twice, ("pallas", None)))) == "Op(twice: pallas, None)"


SHOW = Op("show", {"xla": lambda x, *, k: (print_of(k), x)[1]})
SHOWN = []


def print_of(option):
    SHOWN.append(repr(option))


@pytest.mark.parametrize(
    "options",
    [
        (True, 1, 1.0),
        (2, 2.0),
        (0.0, -0.0),
        (np.float64(0.0), np.float64(-0.0), 0.0),
        (np.float32(0.0), np.float32(-0.0)),
        (float("nan"), float("inf")),
        ((1, 2), (True, 2), (1.0, 2)),
        ((0.0,), (-0.0,)),
        (((False,),), ((0,),)),
        (None, False, ""),
    ],
    ids=str,
)
def test_options_that_are_equal_but_not_the_same_do_not_share(options):
    SHOWN.clear()
    for k in (*options, *options):
        SHOW(X, k=k, implementation="xla")
    assert [repr(k) for k in (*options, *options)] == SHOWN


@pytest.mark.parametrize("option", [float("nan"), np.float64("nan"), (float("nan"),)], ids=repr)
def test_nan_is_one_option(option):
    another = type(option)(option) if option is not tuple else (float("nan"),)
    calls = []
    kernel = lambda x, *, k: (calls.append(k), 2 * x)[1]  # noqa: E731
    call = jaxbp.differentiable(kernel, lambda x, *, k: 2 * x)
    call(X, k=option), call(X, k=another)
    assert len(calls) == 1


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_an_option_that_is_not_hashable_is_refused_with_op_and_option(implementation):
    with pytest.raises(TypeError) as error:
        POWER(X, power=2, scale=[3.0], implementation=implementation)
    assert str(error.value) == "power: scale is a list; wants a hashable value, because options are static"
    with pytest.raises(TypeError, match=r"scale is an array; .* options are static; pass arrays by position"):
        POWER(X, power=2, scale=X[0], implementation=implementation)


def scaled_by_option(x, *, f):
    return f(x)


@pytest.fixture
def few_objects():
    """Exclude objects of earlier tests, which would slow the count of live objects."""
    gc.freeze()


def count_alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_no_more_options_are_kept_than_said_and_none_after_the_pair(implementation):
    gradient = lambda dy, x, *, f: f(dy)  # noqa: E731
    pair = Pair(scaled_by_option, {"xla": gradient, "pallas": lambda dy, x, *, f: f(dy)}, name="scaled")
    references = []
    for i in range(REMEMBERED + 20):
        f = functools.partial(jnp.multiply, float(i))
        references.append(weakref.ref(f))
        jax.eval_shape(functools.partial(pair.vjp, f=f, implementation=implementation), X, X)
        jax.eval_shape(jax.grad(total(functools.partial(pair, f=f), implementation)), X)
    del f
    assert 0 < count_alive(references) <= REMEMBERED
    del pair
    assert count_alive(references) == 0


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("implementation", ["pallas", "xla", None])
def test_pairs_over_arrays_are_let_go_with_their_arrays(implementation):
    references = []

    def use_a_pair(i):
        scale = jnp.full(3, float(i))
        gradient = lambda dy, x: dy * scale  # noqa: E731
        pair = Pair(lambda x: x * scale, {"xla": gradient, "pallas": lambda dy, x: dy * scale}, name="scaled")
        references.extend(map(weakref.ref, (pair, scale)))
        pair(X, implementation=implementation)
        pair.vjp(X, X, implementation=implementation)
        jax.grad(total(pair, implementation))(X)

    for i in range(10):
        use_a_pair(i)
    assert count_alive(references) == 0


POINTS = jnp.linspace(-1, 1, 5)
MARKS = {"pallas": jnp.tan, "xla": jnp.sin, "autodiff": jnp.cos}
MARK = {"tan": "pallas", "sine": "xla", "cosine": "autodiff"}


def taken_in(program):
    (mark,) = [mark for mark in MARK if f".{mark} " in program]
    return MARK[mark]


def marked(names=jaxbp.IMPLEMENTATIONS, **settings):
    return Op("marked", {name: MARKS[name] for name in names}, **settings)


OLDER = dataclasses.replace(HOPPER, kind="NVIDIA A100", capability=(8, 0))


@pytest.fixture(params=[True, False], ids=["kernels run", "kernels do not run"])
def kernels_run(request):
    with targeting(HOPPER if request.param else OLDER):
        yield request.param


@pytest.fixture
def run_on_the_cpu():
    with on_the_cpu():
        yield


@pytest.mark.parametrize("implementation", jaxbp.IMPLEMENTATIONS)
def test_the_implementation_asked_for_is_taken_on_every_platform(implementation, kernels_run):
    call = functools.partial(marked(), implementation=implementation)
    np.testing.assert_array_equal(call(POINTS), MARKS[implementation](POINTS))
    assert taken_in(cuda_program(call, POINTS)) == implementation


def test_a_backward_that_is_no_dict_is_refused_with_what_is_wanted():
    with pytest.raises(TypeError, match=r'^cube: backward is a function; wants a dict .*, say {"xla": ...}, or an Op$'):
        Pair(cube, cube_gradient)


def test_an_op_with_an_unknown_implementation_cannot_be_made():
    with pytest.raises(
        ValueError, match=r"^marked: implementations has \['cuda', 'triton'\]; wants only names among 'pallas'"
    ):
        Op("marked", dict.fromkeys(["xla", "triton", "cuda"], jnp.sin))


def test_what_a_kernel_does_not_take_is_refused_by_name():
    op = marked(unsupported=lambda x, **options: f"arrays of {x.size}" if x.size > 3 else None)
    np.testing.assert_array_equal(op(POINTS[:3], implementation="pallas"), jnp.tan(POINTS[:3]))
    with pytest.raises(NotImplementedError) as error:
        op(POINTS, implementation="pallas")
    message = "marked: implementation='pallas' does not take arrays of 5; wants 'xla', 'autodiff', or None"
    assert str(error.value) == message


def test_the_same_op_under_another_name_has_it_in_its_messages():
    with pytest.raises(ValueError, match=r"^renamed: implementation is 'cuda'; wants"):
        marked().named("renamed")(POINTS, implementation="cuda")


FASTEST = DefaultImplementation(gpu="pallas", older_gpu="autodiff", elsewhere="xla")


def test_none_takes_the_fastest_for_the_platform_that_it_is_lowered_for(kernels_run, run_on_the_cpu):
    op = marked(default=FASTEST)
    assert taken_in(cuda_program(op, POINTS)) == ("pallas" if kernels_run else "autodiff")
    assert taken_in(jax.jit(op).lower(POINTS).as_text()) == "xla"
    np.testing.assert_array_equal(jax.jit(op)(POINTS), jnp.sin(POINTS))


def test_none_without_jit_takes_the_fastest_for_the_platform_that_it_runs_on(kernels_run, run_on_the_cpu):
    np.testing.assert_array_equal(marked(default=FASTEST)(POINTS), jnp.sin(POINTS))


def test_a_kernel_takes_no_symbolic_sizes_and_none_falls_back_without_a_look_at_them(on_hopper):
    sizes = dict(unsupported=lambda x: "a row" if x.size > 3 else None, default=lambda x: FASTEST if x.size > 3 else 0)
    (n,) = jax.export.symbolic_shape("n")
    export = jax.export.export(jax.jit(marked(**sizes)), platforms=("cpu", "cuda"))
    assert_close(export(jax.ShapeDtypeStruct((n,), "float32")).call(POINTS), jnp.sin(POINTS), "float32")
    with pytest.raises(NotImplementedError, match=r"^marked: .*does not take arrays of symbolic sizes"):
        jax.eval_shape(functools.partial(marked(), implementation="pallas"), jax.ShapeDtypeStruct((n,), "float32"))


@pytest.mark.parametrize("gpu", jaxbp.IMPLEMENTATIONS)
@pytest.mark.parametrize("elsewhere", jaxbp.IMPLEMENTATIONS)
def test_what_is_said_to_be_fastest_is_taken(gpu, elsewhere, on_hopper, run_on_the_cpu):
    op = marked(default=DefaultImplementation(gpu=gpu, elsewhere=elsewhere))
    assert taken_in(cuda_program(op, POINTS)) == gpu
    np.testing.assert_array_equal(op(POINTS), MARKS[elsewhere](POINTS))


def test_none_takes_what_is_fastest_on_older_gpus_for_what_a_kernel_does_not_take(on_hopper):
    op = marked(default=FASTEST, unsupported=lambda x: "anything")
    assert taken_in(cuda_program(op, POINTS)) == "autodiff"


@pytest.mark.parametrize(
    ("has", "taken"),
    [(["autodiff"], "autodiff"), (["xla"], "xla"), (["pallas"], "pallas"), (["pallas", "autodiff"], "autodiff")],
    ids=str,
)
def test_none_takes_the_next_best_where_the_fastest_is_lacking(has, taken):
    np.testing.assert_array_equal(
        marked(has, default=DefaultImplementation("xla", "xla", "xla"))(POINTS), MARKS[taken](POINTS)
    )


def square_gradient(dy, x):
    return 2 * x * dy


SQUARE = Pair(
    lambda x: x * x,
    {"xla": square_gradient, "pallas": functools.partial(elementwise, square_gradient)},
    name="square",
)


gradient_of_square = jax.grad(lambda x: jnp.sum(SQUARE(x)))


def test_a_kernel_is_lowered_for_cuda_where_kernels_run(kernels_run):
    assert ("mosaic_gpu" in cuda_program(gradient_of_square, POINTS)) == kernels_run


def test_the_same_function_lowered_for_the_cpu_is_right_and_has_nothing_of_the_kernel(on_hopper, run_on_the_cpu):
    compiled = jax.jit(gradient_of_square).lower(POINTS).compile()
    assert_close(compiled(POINTS), 2 * POINTS, "float32")
    program = compiled.as_text()
    assert "conditional" not in program
    assert "custom-call" not in program


def test_second_derivatives_lower_for_both_platforms(on_hopper, run_on_the_cpu):
    second = jax.grad(lambda x: jnp.sum(gradient_of_square(x)))
    assert_close(jax.jit(second)(POINTS), 2 + 0 * POINTS, "float32")
    assert cuda_program(second, POINTS)


def test_what_is_fastest_may_depend_on_the_arguments():
    default = lambda x: DefaultImplementation(elsewhere="xla" if x.size > 1 else "autodiff")  # noqa: E731
    op = Op("op", {"xla": lambda x: x + 1, "autodiff": lambda x: x + 2}, default=default)
    with on_the_cpu():
        assert [float(op(jnp.zeros(n))[0]) for n in (1, 2)] == [2.0, 1.0]


def scaled(x, w):
    return x * w


def scaled_backward(dy, x, w):
    return dy * w, dy * x


WRONG = {
    "too few": (lambda dy, x, w: dy * w, ValueError, "returns 1 gradients; wants 2, one gradient for each of x, w"),
    "too many": (lambda dy, x, w: (dy, dy, dy), ValueError, "returns 3 gradients; wants 2, one gradient for each of"),
    "a list": (
        lambda dy, x, w: [dy * w, dy * x],
        TypeError,
        "returns a list; wants a tuple with one gradient for each of",
    ),
    "a shape": (
        lambda dy, x, w: (dy * w, jnp.sum(dy * x)),
        ValueError,
        r"the gradient of w has shape \(\); wants \(3,\), the shape of w",
    ),
    "a dtype": (
        lambda dy, x, w: (dy.astype(jnp.float16), dy * x),
        TypeError,
        "the gradient of x has dtype float16; wants float32, the dtype of x",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_backward_that_gives_something_else_is_refused_with_op_argument_and_what_is_wanted(wrong):
    backward, error, message = WRONG[wrong]
    pair, (x, w) = Pair(scaled, {"xla": backward}), (jnp.arange(3.0), jnp.ones(3))
    with pytest.raises(error, match=f"^scaled_backward: {message}"):
        jax.grad(lambda x: jnp.sum(pair(x, w, implementation="xla")))(x)
    with pytest.raises(error, match=f"^scaled_backward: {message}"):
        pair.vjp(x, x, w, implementation="xla")


@pytest.mark.parametrize("number", [2.0, 2, True])
@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_for_a_python_number_is_checked_as_for_an_array(number, jit):
    def gradient(of_number):
        pair = Pair(scaled, {"xla": lambda dy, x, w: (dy * w, of_number(jnp.sum(dy * x)))}, jit=jit)
        jax.grad(lambda x: jnp.sum(pair(x, number, implementation="xla")))(X)
        return pair.vjp(X, X, number, implementation="xla")

    if isinstance(number, float):
        assert_close(gradient(lambda dw: dw), (2 * X, jnp.sum(X * X)), "float32")
        with pytest.raises(ValueError, match=r"the gradient of w has shape \(1,\); wants \(\), the shape of w"):
            gradient(lambda dw: dw[None])
    else:
        assert_close(gradient(lambda dw: None), number * X, "float32")
    with pytest.raises(TypeError, match="the gradient of w has dtype float16"):
        gradient(lambda dw: dw.astype(jnp.float16))


def taken(x, rows):
    return x[rows]


def test_a_gradient_for_integers_is_none_or_float0():
    x, rows = jnp.arange(3.0), jnp.array([0, 2])

    def gradient(of_rows):
        pair = Pair(taken, {"xla": lambda dy, x, rows: (jnp.zeros_like(x).at[rows].add(dy), of_rows)})
        return jax.grad(lambda x: jnp.sum(pair(x, rows, implementation="xla")))(x)

    for none in (None, np.zeros(2, jax.dtypes.float0)):
        np.testing.assert_array_equal(gradient(none), [1, 0, 1])
    with pytest.raises(TypeError, match="the gradient of rows has dtype float32, but rows has dtype int32; wants None"):
        gradient(jnp.ones(2))


def test_a_partial_has_the_name_of_its_function():
    pair = Pair(functools.partial(scaled), {"xla": scaled_backward})
    assert pair.name == "scaled"


def test_forward_mode_says_which_implementation_has_it():
    pair, x = Pair(scaled, {"xla": scaled_backward}), jnp.ones(3)
    with pytest.raises(TypeError, match=r"^scaled: has no forward mode, .* use implementation="):
        jax.jvp(lambda x: pair(x, x, implementation="xla"), (x,), (x,))
    jax.jvp(lambda x: pair(x, x, implementation="autodiff"), (x,), (x,))


def test_a_pair_of_functions_of_a_module_can_be_pickled_under_its_name():
    pair, x = Pair(scaled, {"xla": scaled_backward}).named("product"), jnp.arange(3.0)
    again = pickle.loads(pickle.dumps(pair))
    assert again.name == "product"
    gradients = jax.grad(lambda x, w: jnp.sum(again(x, w, implementation="xla")), (0, 1))(x, 2 * x)
    np.testing.assert_array_equal(gradients, (2 * x, x))


def affine(parameters, x):
    return {"y": parameters["w"] * x + parameters["b"][0], "count": parameters["n"] + 1}


def affine_backward(dy, parameters, x, product):
    dy = dy["y"]
    return {"w": dy * x, "b": [jnp.sum(dy, keepdims=True)], "n": None}, dy * parameters["w"] + 0 * product["wx"]


AFFINE = Pair(
    affine,
    {"xla": affine_backward},
    save=lambda p, x: (affine(p, x), (p, x, {"wx": p["w"] * x})),
)
PARAMETERS = {"w": 2 * X, "b": [jnp.ones(1)], "n": jnp.int32(3)}


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_arguments_results_and_residuals_may_be_pytrees_with_integers(implementation):
    def loss(function):
        return lambda p, x: jnp.sum(jnp.sin(function(p, x)["y"]))

    paired = loss(functools.partial(AFFINE, implementation=implementation))
    found, expected = (jax.grad(f, (0, 1), allow_int=True)(PARAMETERS, X) for f in (paired, loss(affine)))
    assert found[0]["n"].dtype == jax.dtypes.float0
    for gradients in (found, expected):
        del gradients[0]["n"]
    assert_close(found, expected, "float32")
    mapped = jax.jit(jax.vmap(jax.grad(paired, 1), (None, 0)))(PARAMETERS, jnp.stack([X, X]))
    assert_close(mapped[1], expected[1], "float32")


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_vjp_of_a_pytree_gives_none_for_integers(implementation):
    dy = {"y": X, "count": np.zeros((), jax.dtypes.float0)}
    of_parameters, of_x = AFFINE.vjp(dy, PARAMETERS, X, implementation=implementation)
    assert of_parameters["n"] is None
    assert_close((of_parameters["w"], of_parameters["b"], of_x), (X * X, [jnp.sum(X, keepdims=True)], 2 * X * X), 1e-6)


WRONG_TREES = {
    "a structure": (lambda dy: {"w": dy}, ValueError, r"the gradient of p has structure PyTreeDef\({'w': \*}\); wants"),
    "a tree for an array": (lambda dy: {"w": [dy], "b": dy}, ValueError, "the gradient of p has structure"),
    "a shape": (
        lambda dy: {"w": dy[:1], "b": dy},
        ValueError,
        r"the gradient of p\['w'\] has shape \(1,\); wants \(3,",
    ),
    "a dtype": (
        lambda dy: {"w": dy, "b": dy.astype(jnp.float16)},
        TypeError,
        r"the gradient of p\['b'\] has dtype float16; wants float32, the dtype of p\['b'\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_gradient_of_a_pytree_is_refused_with_its_leaf(wrong):
    gradient, error, message = WRONG_TREES[wrong]
    pair = Pair(lambda p: p["w"] + p["b"], {"xla": lambda dy, p: gradient(dy)}, name="sum_of")
    with pytest.raises(error, match=f"^sum_of_backward: {message}"):
        jax.grad(lambda p: jnp.sum(pair(p)))({"w": X, "b": X})


def test_none_may_stand_for_the_gradient_of_any_part_of_a_pytree():
    def gradient(backward):
        pair = Pair(lambda p: p["w"] + p["b"][0], {"xla": lambda dy, p: backward(dy)}, name="sum_of")
        return jax.grad(lambda p: jnp.sum(pair(p, implementation="xla")))({"w": X, "b": [X]})

    for backward in (lambda dy: None, lambda dy: {"w": None, "b": None}, lambda dy: {"w": dy, "b": None}):
        assert not gradient(backward)["b"][0].any()


def counting_residual(x, counts):
    count = lambda x: (counts.append(1), np.exp(x))[1]  # noqa: E731
    return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def gradient_with_policy(counts, policy, **options):
    save = lambda x: (jnp.exp(x), (counting_residual(x, counts),))  # noqa: E731
    pair = Pair(jnp.exp, {"xla": lambda dy, e: dy * e}, save=save, name="exponential", **options)
    layer = jax.checkpoint(lambda x: jnp.sum(jnp.sin(pair(x))), policy=policy)
    return jax.jit(jax.value_and_grad(layer))


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    "policy",
    [None, POLICIES.save_only_these_names("exponential"), POLICIES.everything_saveable],
    ids=["nothing saved", "saved by name", "everything saved"],
)
def test_under_checkpoint_the_residuals_are_computed_once(policy):
    counts = []
    _, gradient = gradient_with_policy(counts, policy)(X)
    assert_close(gradient, jnp.cos(jnp.exp(X)) * jnp.exp(X), "float32")
    jax.effects_barrier()
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (None, False),
        (POLICIES.save_only_these_names("exponential"), True),
        (POLICIES.save_only_these_names("other"), False),
    ],
    ids=["nothing", "the name", "another name"],
)
def test_a_policy_saves_or_recomputes_the_residuals_by_the_ops_name(policy, saved):
    program, _ = pe.dce_jaxpr(gradient_with_policy([], policy).trace(X).jaxpr.jaxpr, [True, True])
    has_residual = "pure_callback" in {equation.primitive.name for equation in program.eqns}
    assert has_residual == (saved and not REMAT3_ALONE)


@pytest.mark.parametrize("op", ["layer_norm", "conv2d_relu_max_pool2d", "max_pool2d", "relu"])
def test_the_residuals_of_ops_that_are_not_arguments_have_the_ops_name(op):
    arrays, _ = drawn(op)
    function = lambda *arrays: jnp.sum(jax.tree.leaves(op_of(op, None, "xla")(*arrays))[0])  # noqa: E731
    assert f"name={op}" in str(jax.make_jaxpr(jax.grad(function))(*arrays))


def test_a_policy_offloads_the_residuals_of_an_op_by_the_ops_name():
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["exponential"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    program = str(gradient_with_policy([], policy).trace(X).jaxpr)
    assert ("host" in program) == (not REMAT3_ALONE)


def test_an_argument_that_is_a_residual_keeps_the_name_that_its_caller_gave_it():
    def layer(x):
        x = jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "input")
        return jnp.sum(FORMULA_ALONE(x, implementation="xla"))

    program = str(jax.make_jaxpr(jax.grad(layer))(X))
    assert "name=input" in program and "name=cube" not in program


def test_second_derivatives_work_under_checkpoint():
    # Here, `optimize_remat` of `jax.custom_vjp` raises an error.
    pair = Pair(jnp.exp, {"xla": lambda dy, y: dy * y}, **EXP)
    layer = jax.checkpoint(lambda x: jnp.sum(pair(x, implementation="xla")))
    assert_close(jax.jit(jax.jacrev(jax.grad(layer)))(X), jnp.diag(jnp.exp(X)), "float32")


SAVES = {
    "no pair": (lambda x: jnp.tanh(x), r"save returns an array; wants \(y, saved\)"),
    "no tuple": (lambda x: (jnp.tanh(x), x), r"save returns \(an array, an array\); wants .* such as \(y, \(x,\)\)"),
}


@pytest.mark.parametrize(("save", "message"), SAVES.values(), ids=SAVES)
def test_a_save_that_returns_no_tuple_of_residuals_is_refused(save, message):
    pair = Pair(jnp.tanh, {"xla": lambda dy, x: dy}, save=save)
    for call in (jax.grad(lambda x: pair(x).sum()), lambda x: pair.vjp(x, x)):
        with pytest.raises(TypeError, match=f"^tanh: {message}"):
            call(jnp.ones(2))


NO_FUNCTIONS = {
    "forward": (lambda: Pair(3, {}), "Pair: forward is 3; wants a function"),
    "backward": (lambda: Pair(jnp.tanh, {"xla": 3}), "tanh_backward: the implementation 'xla' is 3; wants a function"),
    "default": (
        lambda: Pair(jnp.tanh, {}, default="xla"),
        "tanh: default is 'xla'; wants a jaxbp.DefaultImplementation",
    ),
    "option": (
        lambda: jax.grad(Pair(lambda x, *, a: a * x, {"xla": lambda dy, x: dy}, name="scale"))(X[0], a=2.0),
        ".*got an unexpected keyword argument 'a'; wants a backward with the options of the forward",
    ),
    "aux": (
        lambda: jax.grad(Pair(jnp.tanh, {"xla": lambda dy, x: dy}, has_aux=True))(X[0]),
        r"tanh: returns a result that is no tuple; wants \(y, \*aux\), because has_aux is True",
    ),
    "formula": (lambda: jaxbp.differentiable(jnp.tanh, 3), "differentiable: formula is 3; wants a function"),
    "no return": (lambda: jax.grad(Pair(jnp.tanh, {"xla": lambda dy, x: None}))(X[0]), "tanh_backward: returns None; "),
}


@pytest.mark.parametrize(("call", "message"), NO_FUNCTIONS.values(), ids=NO_FUNCTIONS)
def test_what_is_no_function_is_refused(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def test_a_backward_of_a_result_that_is_not_saved_names_save():
    exponential = Pair(jnp.exp, {"xla": lambda dy, x, y: dy * y}, name="exponential")
    message = r"^exponential_backward: does not take dy and 1 saved arrays \(missing .*'y'\); wants `save=` in `Pair`"
    for call in (jax.grad(exponential), lambda x: exponential.vjp(x, x)):
        with pytest.raises(TypeError, match=message):
            call(1.0)

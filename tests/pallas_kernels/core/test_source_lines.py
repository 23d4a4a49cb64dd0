import inspect

import jax
import jax.numpy as jnp

from pallas_kernels.core.source_lines import RuleLines


@jax.custom_vjp
def op(x):
    return 2 * x


def backward(_, dy):
    return (jnp.sin(dy),)


op.defvjp(lambda x: (op(x), None), backward)


def test_an_operation_in_a_rule_has_its_line_and_then_those_of_the_operation_with_the_rule():
    lines = RuleLines()
    with lines.recording():
        program = jax.make_jaxpr(jax.grad(lambda x: op(x)))(1.0)
    (sine,) = [e for e in program.eqns if e.primitive.name == "sin"]
    here = [line for file, line in lines.frames(sine.source_info.traceback) if file == __file__]
    of_backward = inspect.getsourcelines(backward)[1] + 1
    of_call = inspect.currentframe().f_code.co_firstlineno + 3
    assert here[0] == of_backward and of_call in here[1:]
    (sine,) = [e for e in jax.make_jaxpr(jax.grad(lambda x: op(x)))(1.0).eqns if e.primitive.name == "sin"]
    assert of_backward not in [f.line_num for f in sine.source_info.traceback.frames if f.file_name == __file__]

"""The public ops, one file per family. `jaxbp.catalogue` lists them all.

Invalid arguments raise a TypeError or a ValueError. A backward has the arguments of its forward, and gradients have the
dtypes of the arrays, unless its docstring says otherwise. The promoted dtype is the dtype to which `jax.numpy` promotes
the arrays.
"""

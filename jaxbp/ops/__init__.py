"""The public ops, one file per family. `jaxbp.catalogue` lists them all.

A function `*_backward` has the arguments and errors of its forward, unless its docstring says otherwise. "The promoted
dtype" is the dtype to which `jax.numpy` promotes the named arrays.
"""

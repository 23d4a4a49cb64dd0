"""The public ops, one file per family. `jaxbp.catalogue` lists them all.

Unless a docstring says otherwise:

- An invalid argument raises a TypeError or a ValueError.
- Half precisions are summed in float32 (docs/mixed_precision.md lists the dtypes op by op).
- A backward has the arguments of its forward, and gradients have the dtypes of the arrays.
"""

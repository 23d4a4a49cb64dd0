"""The public ops, one file per family. `jaxbp.catalogue` lists them all."""

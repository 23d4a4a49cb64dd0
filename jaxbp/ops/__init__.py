"""The library of ops, a file a family. `jaxbp.catalogue` lists them all."""

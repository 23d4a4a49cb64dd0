"""The library of ops, a file a family, and the table that lists them."""

"""Element-wise ops, reductions, losses, and dropout."""

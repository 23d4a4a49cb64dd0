"""Matrix products, dense layers, and cross-entropy."""

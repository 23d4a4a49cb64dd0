"""Argument checks, numerics, and the geometry of windows, which several packages use."""

"""Layers, trees, and automata of logic gates."""

"""Hardened circuits, netlists, and their C and Verilog sources."""

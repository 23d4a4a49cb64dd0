"""Circuits of gates with fixed functions, netlists, and their C and Verilog sources."""

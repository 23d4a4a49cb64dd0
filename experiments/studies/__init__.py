"""Studies for the documentation: `python -m experiments.studies.NAME`."""

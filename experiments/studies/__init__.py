"""Studies for the documentation. Run one as `python -m experiments.studies.NAME`."""

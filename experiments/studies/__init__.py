"""Studies whose results are shown in the documentation. Run one as `python -m experiments.studies.NAME`."""

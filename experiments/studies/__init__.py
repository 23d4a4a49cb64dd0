"""Studies whose results the documentation shows. Run one as `python -m experiments.studies.NAME`."""

"""Studies whose results the book shows. Run one as `python -m experiments.studies.NAME`."""

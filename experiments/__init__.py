"""What people run: `python -m experiments.{train,check,compare,tune,bench}`."""

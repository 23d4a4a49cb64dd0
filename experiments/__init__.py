"""What people run: configurations, datasets, the training loop and its command line."""

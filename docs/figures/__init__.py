"""Tables and charts of the book, made from the measured runs in docs/results/."""

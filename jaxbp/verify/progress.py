"""A line in a terminal that says what a long check is at."""

import sys
import time

SILENT, EVERY = 1.0, 0.2
"""Seconds before the first line, and between lines."""


class Progress:
    """Shows a line on stderr, if that is a terminal, from one second on. It is wiped at the end.

    Args:
      name: begins the line.
    """

    def __init__(self, name: str):
        self._name, self._next, self._width = name, time.monotonic() + SILENT, 0
        self._start = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")

    def show(self, text: str) -> None:
        """Show what the check is at, unless a line was shown just now."""
        if (now := time.monotonic()) >= self._next and sys.stderr.isatty():
            self._next = now + EVERY
            self._write(f"check {self._name}, {now - self._start:.0f} s: {text}"[:79])

    def _write(self, line):
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

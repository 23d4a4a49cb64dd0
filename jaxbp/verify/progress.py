"""The progress of a long check, in one line."""

import sys
import time

SILENT, EVERY = 1.0, 0.2
"""Seconds before the first line, and between two lines."""


class Progress:
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
        if (now := time.monotonic()) >= self._next and sys.stderr.isatty():
            self._next = now + EVERY
            self._write(f"check {self._name}, {now - self._start:.0f} s: {text}"[:79])

    def _write(self, line):
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

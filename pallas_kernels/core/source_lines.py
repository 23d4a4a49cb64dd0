"""Record the lines of operations inside kernels and custom rules, for which JAX records only the line of the call."""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src.source_info_util import SourceInfo, _source_info_context, new_source_info

JAX_FOLDER = str(Path(jax.__file__).parent)

# JAX traces functions again if this context changes. A new context changes jit's cache key.
_TRACE, _TRACES = jax.make_user_context(default_value=0), itertools.count(1)


def recording_lines() -> contextlib.AbstractContextManager[None]:
    """Let operations record their line in the kernel's body, not the line that calls `launch`."""
    return _context(new_source_info().replace(name_stack=_source_info_context.context.name_stack))


class RuleLines:
    """The lines of operations in custom rules, which the context `recording()` collects while JAX traces functions.

    JAX traces a custom rule when it differentiates the outer operation that has this rule. JAX gives each operation in
    the rule the traceback of the outer operation. In this context, each operation in the rule keeps the traceback of
    its line, and `frames` then yields the traceback of the outer operation.
    """

    def __init__(self):
        self._continued: dict[int, tuple[Any, int, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        name_stack = _source_info_context.context.name_stack
        with _TRACE(next(_TRACES)), _context(_InRules(None, name_stack, self)):
            yield

    def frames(self, traceback: Any) -> Iterator[tuple[str, int]]:
        """Yield files and lines, innermost first."""
        while traceback is not None:
            _, count, outer = self._continued.get(id(traceback), (traceback, None, None))
            for frame in traceback.frames[:count]:
                yield frame.file_name, frame.line_num
            traceback = outer

    def joined(self, traceback: Any, count: int, outer: Any) -> Any:
        """Return the traceback to show for an operation: `traceback` or `outer`.

        JAX evaluated the operation within an outer operation with a custom rule. `outer` is the traceback of the outer
        operation. The innermost `count` frames of `traceback` belong to the evaluation.

        If all these frames are in JAX or in frozen modules, no line of a custom rule made the operation. Return
        `outer`. Otherwise, return `traceback`, and record that `frames` yields these frames, followed by the frames of
        `outer`.
        """
        codes, _ = traceback.raw_frames()
        if all(code.co_filename.startswith((JAX_FOLDER, "<frozen")) for code in codes[:count]):
            return outer
        self._continued[id(traceback)] = traceback, count, outer
        return traceback


class _InRules(SourceInfo):
    """The source line of an operation while JAX traces the operation's lowering rule, and the depth of the stack at its
    start."""

    __slots__ = ["_depth", "_lines", "_outer"]

    def __init__(self, traceback, name_stack, lines, outer=None, depth=0):
        super().__init__(traceback, name_stack)
        self._lines, self._outer, self._depth = lines, outer, depth

    def replace(self, *, traceback=None, name_stack=False):
        if traceback is not None and name_stack is False:  # a new operation
            if self._outer is not None:
                traceback = self._lines.joined(traceback, _depth() - self._depth, self._outer)
            return SourceInfo(traceback, self.name_stack)
        outer, depth, name_stack = self._outer, self._depth, name_stack or self.name_stack
        if traceback is not None:  # JAX evaluates or differentiates an operation
            outer, depth = traceback, _depth()
        return _InRules(None, name_stack, self._lines, outer, depth)


def _depth() -> int:
    # JAX's tracebacks end where the tracing of a jitted function begins.
    frame, count = sys._getframe(2), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


@contextlib.contextmanager
def _context(info: SourceInfo) -> Iterator[None]:
    outside = _source_info_context.context
    _source_info_context.context = info
    try:
        yield
    finally:
        _source_info_context.context = outside

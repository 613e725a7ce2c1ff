"""Work of `torch.export` that nobody reads, left out.

`torch.export` compiles the Python code of some ten intermediate graphs, and looks up the text of
all lines on every operator's stack: a third of its time where a model unrolls a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import fx


@contextmanager
def lean_export() -> Iterator[None]:
    """Compile a graph's code only when it first runs, and keep only `forward`s of stack traces."""
    with (
        patch.object(fx.GraphModule, "recompile", _recompile_when_run),
        patch.object(fx.proxy, "CapturedTraceback", _Forwards, create=True),
    ):
        yield


_recompile = fx.GraphModule.recompile


def _recompile_when_run(module: fx.GraphModule) -> None:
    """Replace `GraphModule.recompile`; every graph module has a class of its own."""

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is forward:
            _recompile(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward


class _Forwards:
    """A stack trace reduced to its `forward`s, which is what a tracer keeps."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self._frames = frames

    @classmethod
    def extract(cls) -> _Forwards:
        """The stack trace of the caller."""
        frames: list[FrameSummary] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward":
                where = (code.co_filename, frame.f_lineno, code.co_name)
                frames.append(FrameSummary(*where, lookup_line=False, line=""))
            frame = frame.f_back
        return cls(frames[::-1])

    def summary(self) -> StackSummary:
        """The stack trace, as `CapturedTraceback` has it."""
        return StackSummary.from_list(self._frames)

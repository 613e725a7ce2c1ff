"""Leave out what `torch.export` writes down beside its graph and nobody reads.

It compiles the Python code of some ten intermediate graphs, and looks up the text of all lines on
the stack of every operator: a third of its time where a model unrolls a loop.
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
    """Inside, a graph's code is made when it first runs, and stacks are those of `forward`s."""
    with (
        patch.object(fx.GraphModule, "recompile", _recompile_when_run),
        patch.object(fx.proxy, "CapturedTraceback", _Forwards, create=True),
    ):
        yield


_recompile = fx.GraphModule.recompile


def _recompile_when_run(module: fx.GraphModule) -> None:
    """In place of `GraphModule.recompile`; every graph module has a class of its own."""

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is forward:
            _recompile(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward


class _Forwards:
    """In place of a whole stack: where every `forward` on it is, which is what a tracer keeps."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self._frames = frames

    @classmethod
    def extract(cls) -> _Forwards:
        """The stack of who calls."""
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
        """As that of torch's own."""
        return StackSummary.from_list(self._frames)

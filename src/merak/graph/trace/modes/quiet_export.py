"""Output of traces: what of it is held back, and what is said once for all layers and shapes."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from merak.core.rank0 import AT_ONCE


@dataclass(slots=True)
class Warned:
    """Warnings of the traces of one model, by their text without numbers: layers, and sizes.

    Args:
        held: of the trace that is under way: what says the first of its kind, and how many came.
        known: kinds that have been said.
    """

    held: dict[Any, list[Any]] = field(default_factory=dict)
    known: set[Any] = field(default_factory=set)

    def hold(self, kind: tuple[Any, ...], text: str, say: Any) -> None:
        """Hold a warning until the trace ends.

        Args:
            kind: what it has in common with others beside its text.
            text: what it says.
            say: says a text in its place.
        """
        key = (*kind, re.sub(r"\d+", "#", text))
        if key not in self.known:
            self.held.setdefault(key, [text, say, 0])[2] += 1

    def say(self) -> None:
        """Emit the warnings that were held back, each kind once with its number."""
        held, self.held = self.held, {}
        self.known |= held.keys()
        for text, say, count in held.values():
            say(text if count == 1 else f"{text} (and {count - 1} more like it)")


@contextmanager
def warned_once(warned: Warned) -> Iterator[None]:
    """Hold warnings back and emit each kind once at the end; torch's loggers stay silent.

    What fails on the way is explained, or traced anew; torch logs each with its stack.

    Args:
        warned: what was said before, in other traces of the model.
    """
    handle, show = logging.Logger.handle, warnings.showwarning

    def heard(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or hasattr(record, AT_ONCE):
            handle(logger, record)
        elif record.name.partition(".")[0] != "torch":

            def say(text: str) -> None:
                record.msg, record.args = text, ()
                handle(logger, record)

            warned.hold((record.name, record.levelno), record.getMessage(), say)

    def shown(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        def say(text: str) -> None:
            show(UserWarning(text), category, filename, lineno, *rest)

        warned.hold((category, filename, lineno), str(message), say)

    patch = mock.patch.object
    try:
        with patch(logging.Logger, "handle", heard), patch(warnings, "showwarning", shown):
            yield
    finally:
        warned.say()


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hold back what `torch.export` prints of a graph that failed, or warns of."""
    printed = io.StringIO()
    graph = ""
    try:
        with redirect_stderr(printed), warnings.catch_warnings():
            # What a forward assigns is compared, and undone, by a snapshot of Python state.
            warnings.filterwarnings("ignore", message=".*assigned during export")
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        sys.stderr.write(printed.getvalue().replace(graph, "") if graph else printed.getvalue())

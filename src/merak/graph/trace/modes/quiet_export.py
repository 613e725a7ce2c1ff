"""Output of `torch.export` on failures, held back: another trace may follow that succeeds."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from unittest import mock


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Hold back warnings and errors of torch's loggers: what fails is explained, or traced anew."""
    handle = logging.Logger.handle

    def heard(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or record.name.partition(".")[0] != "torch":
            handle(logger, record)

    with mock.patch.object(logging.Logger, "handle", heard):
        yield


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

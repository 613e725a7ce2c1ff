"""Output of `torch.export` on failures, held back: another trace may follow that succeeds."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

_SPEAKS_OF_FAILURES = "torch.fx.experimental.symbolic_shapes"


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hold back what `torch.export` prints of a graph that failed, or warns of."""
    printed = io.StringIO()
    logger = logging.getLogger(_SPEAKS_OF_FAILURES)
    graph = ""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Unable to find user code corresponding to")

    logger.addFilter(is_other)
    try:
        with redirect_stderr(printed), warnings.catch_warnings():
            # What a forward assigns is compared, and undone, by a snapshot of Python state.
            warnings.filterwarnings("ignore", message=".*assigned during export")
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        logger.removeFilter(is_other)
        sys.stderr.write(printed.getvalue().replace(graph, "") if graph else printed.getvalue())

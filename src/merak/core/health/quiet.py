"""Warnings of libraries that users of a job of ranks can do nothing about, or see many times.

What one rank of a job warns of, all others do, too: rank 0 alone says it. Whatever the user has set
up stays: levels that are not at their default, and filters of Python's warnings.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")

_NEEDLESS = (
    # Of models whose class names no loss of transformers' table, GPT-2 among them; the loss that
    # it then takes is the right one.
    "`loss_type=None` was set in the config but it is unrecognized",
)
"""Beginnings of messages that say nothing to do."""

_NEEDLESS_PYTHON = (
    # peft reads an attribute that transformers has renamed.
    "`is_gradient_checkpointing` is deprecated",
)
"""Beginnings of Python's warnings, as patterns, about what libraries do with each other."""

_VERBOSITY = "TRANSFORMERS_VERBOSITY"

_SERIAL_TRANSFERS = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Whether torch warns that transfers of a group run one after another, which ours are made for."""


class _Needless(logging.Filter):
    """Filter of messages of transformers that nobody can act on."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        return not str(record.msg).startswith(_NEEDLESS)


class _Once(logging.Filter):
    """Filter that shows every message once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


_needless = _Needless()

_raised: dict[str, int] = {}
"""The level of our own log before it was raised."""


def hide_needless() -> None:
    """Hide what libraries warn of in this process and nobody can act on."""
    logging.getLogger("transformers.modeling_utils").addFilter(_needless)
    os.environ.setdefault(_SERIAL_TRANSFERS, "false")
    for pattern in _NEEDLESS_PYTHON:
        warnings.filterwarnings("ignore", pattern, module="transformers", append=True)


def quiet_libraries(rank: int) -> None:
    """Hide what libraries warn of needlessly, and on other ranks than 0 what they warn of at all.

    Errors are shown on every rank.

    Args:
        rank: of this process in its job.
    """
    hide_needless()
    if rank > 0:
        hide_warnings()


def hide_warnings() -> None:
    """Hide all warnings of libraries in this process; errors are shown."""
    if _VERBOSITY in os.environ:
        return
    # Behind all filters that are there: those of the user decide first.
    pattern = rf"({'|'.join(_LIBRARIES)})(\.|$)"
    warnings.filterwarnings("ignore", module=pattern, append=True)
    library = logging.getLogger("transformers")
    if "transformers" not in sys.modules:
        os.environ[_VERBOSITY] = "error"  # which it reads when it is imported
    elif library.level in (logging.NOTSET, logging.WARNING):
        library.setLevel(logging.ERROR)


def warn_once() -> None:
    """Show each message of transformers once a process, and needless ones not at all."""
    import transformers.utils.logging as library

    hide_needless()
    library.get_logger()  # which makes the handlers
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:  # which writes; others may keep records
            handler.addFilter(_Once())


def quiet_other_ranks(rank: int) -> None:
    """Raise our own log level to WARNING on ranks other than 0, unless the user has set a level.

    Args:
        rank: of this process in its job.
    """
    own = logging.getLogger("merak")
    if rank and own.level == logging.NOTSET:
        _raised["level"] = own.level
        own.setLevel(logging.WARNING)


def unquiet_other_ranks() -> None:
    """Set our own log level back to what it was before `quiet_other_ranks`."""
    if "level" in _raised:
        logging.getLogger("merak").setLevel(_raised.pop("level"))

"""Lines of a model's code and of the user's script: the one list of code that is neither.

While a model is traced, its own code may well be an installed package's, such as a model of
transformers; only what every model runs through is library code there. In a training script that
fails, all installed code is.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from types import FrameType

import typing_extensions

MERAK = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Merak's own package."""

_TRACING = os.path.join(MERAK, "graph") + os.sep


def _folder(package: str, *inner: str) -> tuple[str, ...]:
    """The folder of a package, which is not imported for that; none where it is not installed."""
    spec = find_spec(package)
    found = spec.submodule_search_locations if spec is not None else None
    return (os.path.join(found[0], *inner) + os.sep,) if found else ()


LIBRARIES: tuple[str, ...] = (
    *_folder("torch"),  # runs beneath every line of a model
    *_folder("numpy"),  # its generators call each other
    *_folder("transformers", "utils"),  # decorators around every forward
    *(contextlib.__file__, typing_extensions.__file__, warnings.__file__),  # decorators of torch
    # take the place of functions and methods that a model calls
    *(_TRACING, os.path.join(MERAK, "engine", "optimizer", "second_step.py")),
)
"""Beginnings of paths of code that every model runs through; no line of it is a model's own."""

_INSTALLED = (MERAK, sysconfig.get_path("stdlib") + os.sep)
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_tracing_code(file: str) -> bool:
    """Whether a source file is Merak's own graph code."""
    return file.startswith(_TRACING)


def is_library(file: str) -> bool:
    """Whether a source file is code that every model runs through, or is generated."""
    return file.startswith(LIBRARIES) or is_generated(file)


def is_standard_library(file: str) -> bool:
    """Whether a source file is one of Python's own."""
    is_pythons = file.startswith(_INSTALLED[1])
    return is_pythons and not any(folder in file for folder in _PACKAGE_FOLDERS)


def is_installed(file: str) -> bool:
    """Whether a source file is Python's, Merak's or another installed package's, or generated."""
    in_packages = any(folder in file for folder in _PACKAGE_FOLDERS)
    return in_packages or file.startswith(_INSTALLED) or is_generated(file)


def is_generated(file: str) -> bool:
    """Whether code is in no file, such as a graph's or what is built into Python."""
    return file.startswith("<") and file != "<stdin>"  # which is a script of the user


def module_file(name: str) -> str | None:
    """Source file of an imported module; a lazy one, whose attributes import more, is not asked.

    Args:
        name: of the module.
    """
    try:
        held = object.__getattribute__(sys.modules.get(name), "__dict__")
    except AttributeError:  # not imported, or an object in the place of a module
        return None
    file = held.get("__file__")
    return file if isinstance(file, str) else None


def model_frame(frame: FrameType | None = None) -> FrameType:
    """The innermost call of a model's own code that is under way.

    Args:
        frame: where to begin; by default the caller's.

    Returns:
        The outermost call, where all are library code or Python's own.
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not (is_library(file) or is_standard_library(file)):
            break
        frame = frame.f_back
    return frame


def model_line(frame: FrameType | None = None) -> str:
    """File and number of the line of a model's own code that runs now, as "file:number".

    Args:
        frame: where to begin; by default the caller's.
    """
    found = model_frame(frame or sys._getframe(1))
    return f"{found.f_code.co_filename}:{found.f_lineno}"


def with_text(line: str) -> str:
    """A line, given as "file:number", with the text that stands there."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if file and number.isdecimal() else ""
    return f"{line}: `{text}`" if text else line


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the user's script on a stack, as "file:number"; empty if none is.

    Args:
        frames: the outermost first.
    """
    own = [f for f in frames if not is_installed(f.filename) and os.path.isfile(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def is_called_by_merak(frame: FrameType | None, *skipped: str) -> bool:
    """Whether the innermost code above torch and Python's own is Merak's, or there is none.

    Args:
        frame: where to begin.
        skipped: files that do not count.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in skipped:
            if file.startswith(MERAK):
                return True
            is_main = frame.f_globals.get("__name__") == "__main__"  # perhaps in no file
            if is_main or not (is_library(file) or is_standard_library(file)):
                return False
        frame = frame.f_back
    return True


def script_line() -> str:
    """The innermost line of the user's script that runs, as "file:number"; empty if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""

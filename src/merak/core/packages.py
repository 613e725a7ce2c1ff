"""Packages: versions of the installed ones, and those that a model needs and that are not."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from merak.core.errors import PackageError

_REQUIRED = re.compile(
    r"requires (?:the )?([\w .-]+?)(?: library)?,? (?:but it was|which were) not found"
)


def installed_version(package: str) -> str:
    """Version of an installed package; "unknown" for one that runs from its sources.

    Args:
        package: its name as a distribution.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def refuse_missing(package: str, what: str) -> None:
    """Refuse what needs a package that is an extra of Merak's, and that is not installed.

    Args:
        package: its name, which is also that of the extra.
        what: needs it.

    Raises:
        PackageError: it is not installed.
    """
    if find_spec(package) is None:
        raise PackageError(
            f"{what} needs {package}, which is not installed; run pip install "
            f"'merak-train[{package}]'."
        )


def missing_package(model: str, error: ImportError) -> str:
    """Advise in a sentence what to install before a model can be built.

    Args:
        model: its name.
        error: raised by Python's import, or by transformers, which requires the packages of a
            model one after the other.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2]).rstrip(".") or type(error).__name__
    found = _REQUIRED.findall(str(error)) or [error.name]
    packages = [name.partition(".")[0] for name in found if name]
    if not packages:
        return f"{model} needs a package that is not installed: {message}."
    are = "is" if len(packages) == 1 else "are"
    return f"{model} needs {' and '.join(packages)}, which {are} not installed; install it."

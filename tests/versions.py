"""Models that an older PyTorch cannot export, and that Merak refuses there with a sentence."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from merak.core.errors import TraceError


def exported_since(*release: int) -> pytest.MarkDecorator:
    """A mark of a test whose model is refused before a release of PyTorch, and must be.

    Args:
        release: the first one that exports it, such as 2, 13.
    """
    return pytest.mark.xfail(
        Version(torch.__version__).release < release,
        raises=TraceError,
        strict=True,
        reason=f"exported since torch {'.'.join(map(str, release))}",
    )

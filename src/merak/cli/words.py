"""Words that are nearly right."""

from __future__ import annotations

from merak.core.did_you_mean import near

__all__ = ["near"]

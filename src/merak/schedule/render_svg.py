"""Former place of `render_html`, which `merak.schedule` exports."""

from __future__ import annotations

import warnings

from merak.schedule.render.svg import render_html

__all__ = ["render_html"]

warnings.warn(
    "merak.schedule.render_svg has moved; import render_html from merak.schedule.",
    DeprecationWarning,
    stacklevel=2,
)

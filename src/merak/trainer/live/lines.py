"""Figures of a log as one line of text, for terminals and files alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from merak.core.units import step_time

_HIDDEN = (
    "epoch",
    "total_flos",
    "step",
    "num_input_tokens_seen",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_tokens_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)
"""Figures that a line leaves out: others say the same, or nobody follows them."""


def number(value: float) -> str:
    """Format a figure of any size: 6.942, 0.0042, 4.2e-06."""
    if isinstance(value, int) or (value == int(value) if math.isfinite(value) else False):
        return f"{int(value):,}"
    return f"{value:.4g}"


def percent(fraction: float) -> str:
    """Format a fraction: 24 %, 3.1 %."""
    return f"{100 * fraction:.3g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def duration(seconds: float) -> str:
    """Format a duration for people who wait: 48 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit_s, unit, part_s, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    return f"{whole} s"


FORMATS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss {}", number),
    "learning_rate": ("learning rate {}", number),
    "grad_norm": ("gradient norm {}", number),
    "tokens_per_second": ("{} tokens/s", lambda value: f"{value:,.0f}"),
    "step_seconds": ("{} a step", step_time),
    "mfu": ("MFU {}", percent),
    "bubble": ("bubble {}", percent),
    "peak_memory_gb": ("GPU memory {}", lambda value: f"{value:.3g} GB"),
    "memory_gb": ("process memory {}", lambda value: f"{value:.3g} GB"),
}
"""Figures in the order in which they are shown: text around each, and its format."""


def shown(name: str, value: float) -> str:
    """Format a figure with its name."""
    text, form = FORMATS.get(name, (f"{name.replace('_', ' ')} {{}}", number))
    return text.format(form(value))


def line(logs: Mapping[str, Any]) -> str:
    """Format the figures of a log in one line.

    Args:
        logs: by name; what is no number stays as it is.
    """
    known = [name for name in FORMATS if name in logs]
    others = [name for name in logs if name not in FORMATS and not _is_hidden(name)]
    parts = []
    for name in (*known, *others):
        value = logs[name]
        plain = not isinstance(value, int | float)
        parts.append(f"{name} {value}" if plain else shown(name, value))
    return ", ".join(parts)


def _is_hidden(name: str) -> bool:
    """Whether a line leaves a figure out; of memory, it has the largest rank's alone."""
    return name in _HIDDEN or "memory_gb_pp" in name

"""Pipeline schedules as data: built, checked, simulated, drawn and lowered to an engine's steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merak.schedule.costs import Costs, stage_costs
    from merak.schedule.ir import Schedule
    from merak.schedule.registry import build, names
    from merak.schedule.render.svg import render_html
    from merak.schedule.render.text import render_texts
    from merak.schedule.simulator.simulate import simulate
    from merak.schedule.simulator.timeline import measured_timeline, simulated_timeline

_HOMES = {
    "Costs": "merak.schedule.costs",
    "Schedule": "merak.schedule.ir",
    "build": "merak.schedule.registry",
    "measured_timeline": "merak.schedule.simulator.timeline",
    "names": "merak.schedule.registry",
    "render_html": "merak.schedule.render.svg",
    "render_texts": "merak.schedule.render.text",
    "simulate": "merak.schedule.simulator.simulate",
    "simulated_timeline": "merak.schedule.simulator.timeline",
    "stage_costs": "merak.schedule.costs",
}

__all__ = [
    "Costs",
    "Schedule",
    "build",
    "measured_timeline",
    "names",
    "render_html",
    "render_texts",
    "simulate",
    "simulated_timeline",
    "stage_costs",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most of them import numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'merak.schedule' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

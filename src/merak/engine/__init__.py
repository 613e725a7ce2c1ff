"""The engine: builds this rank's segments, runs its list of actions and steps the optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merak.engine.build import build_engine, forecast_of
    from merak.engine.engine import Engine
    from merak.engine.health.step_records import StepRecord
    from merak.graph.segment.build import GraphSource
    from merak.plan.engine_options import EngineOptions

_HOMES = {
    "Engine": "merak.engine.engine",
    "EngineOptions": "merak.plan.engine_options",
    "GraphSource": "merak.graph.segment.build",
    "StepRecord": "merak.engine.health.step_records",
    "build_engine": "merak.engine.build",
    "forecast_of": "merak.engine.build",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "GraphSource",
    "StepRecord",
    "build_engine",
    "forecast_of",
]


def __getattr__(name: str) -> Any:
    """Import a name of the facade when it is first used; files of the engine import one another."""
    if name not in _HOMES:
        raise AttributeError(f"module 'merak.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

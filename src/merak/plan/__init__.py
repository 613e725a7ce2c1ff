"""The planner: cost and memory of a model on devices, its stages and its activation policy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merak.plan.activations.forecast import Forecast
    from merak.plan.cost.device import PRESETS, DeviceProfile, preset
    from merak.plan.cost.measured_times import SegmentTimes, load_times, save_times
    from merak.plan.engine_options import EngineOptions
    from merak.plan.partition import Partition
    from merak.plan.step_plans import StepPlans

_HOMES = {
    "PRESETS": "merak.plan.cost.device",
    "DeviceProfile": "merak.plan.cost.device",
    "EngineOptions": "merak.plan.engine_options",
    "Forecast": "merak.plan.activations.forecast",
    "Partition": "merak.plan.partition",
    "SegmentTimes": "merak.plan.cost.measured_times",
    "StepPlans": "merak.plan.step_plans",
    "load_times": "merak.plan.cost.measured_times",
    "preset": "merak.plan.cost.device",
    "save_times": "merak.plan.cost.measured_times",
}

__all__ = [
    "PRESETS",
    "DeviceProfile",
    "EngineOptions",
    "Forecast",
    "Partition",
    "SegmentTimes",
    "StepPlans",
    "load_times",
    "preset",
    "save_times",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: planning imports torch, which takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'merak.plan' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

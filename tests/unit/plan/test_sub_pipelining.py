"""The decision on sub-pipelining: the user's option, and the gain in the simulated schedule."""

from __future__ import annotations

import pytest

from merak.core.errors import PlanError
from merak.plan.cost.overlap import Layers
from merak.plan.engine_options import EngineOptions
from merak.plan.sub_pipelining import requested_sub_pipelining, sub_pipelining_gain
from merak.schedule.registry import build


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble_h1"])
def test_every_schedule_gains_as_much_as_is_hidden(name: str) -> None:
    layers = Layers(24, 1.0, 1.0)
    schedule = build(name, 4, 8)
    gain = sub_pipelining_gain(schedule, (layers,) * 4, hidden=1.0)
    assert 1.3 < gain < 2  # all sums, as long as the forward, at the most
    assert sub_pipelining_gain(schedule, (layers,) * 4, hidden=0.0) == 1.0
    assert 1.0 < sub_pipelining_gain(schedule, (layers,) * 4, hidden=0.5) < gain


def test_one_stage_gains_what_its_layers_gain() -> None:
    layers = Layers(6, 1.0, 0.7)
    schedule = build("1f1b", 1, 5, recompute=False)
    whole_s, split_s = (layers.forward_s(s) + layers.backward_s(s) for s in (False, True))
    found = sub_pipelining_gain(schedule, (layers,), hidden=1.0)
    assert found == pytest.approx(whole_s / split_s)


def test_what_takes_no_time_gains_nothing() -> None:
    assert sub_pipelining_gain(build("1f1b", 1, 1), (Layers(2, 0.0, 0.0),), hidden=1.0) == 1.0


def test_sub_pipelining_is_refused_with_sequence_parallelism() -> None:
    both = EngineOptions(sub_pipelining="on", sequence_parallel=True)
    with pytest.raises(PlanError, match=r"hides all-reduces, of which sequence_parallel=True"):
        requested_sub_pipelining(both)
    assert requested_sub_pipelining(EngineOptions(sequence_parallel=True)) == "off"
    assert requested_sub_pipelining(EngineOptions(sub_pipelining="on")) == "on"

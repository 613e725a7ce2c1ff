"""Which segments are a stage: by times, which rest on the speeds of a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from merak.core import mesh
from merak.data import signature
from merak.engine import forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.cost.device import DeviceProfile, preset
from merak.plan.engine_options import EngineOptions
from tests.unit.engine.models import gpt2, text_batch


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    mesh.reset()
    yield
    mesh.reset()


@pytest.mark.parametrize("given", [preset("a100-80gb"), None], ids=["given", "measured"])
def test_speeds_are_measured_where_none_are_given(
    given: DeviceProfile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def measure(device: torch.device, cache: Path | None) -> DeviceProfile:
        asked.append(device)
        return preset("a100-80gb")

    monkeypatch.setattr("merak.plan.layout.measure", measure)
    place = mesh.Mesh(1, 1, 2, 0, torch.device("cpu"), None)
    options = EngineOptions(num_microbatches=4, device_profile=given)
    found = forecast_of(GraphSource(gpt2()), signature(text_batch()).columns, place, options)
    assert found.layout.partition.num_stages == 2
    assert bool(asked) == (given is None)

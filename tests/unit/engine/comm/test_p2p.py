"""The route of tensors between pp ranks: through the host while programs are new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merak.engine.comm import p2p
from merak.engine.comm.p2p import Route, as_carried
from merak.engine.engine import Engine
from tests.unit.engine.test_python_state import Tempered, engine_of, step

GPU = torch.device("meta")  # stands for one: a place that is not the host's memory


@pytest.fixture
def carries_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "carried_device", lambda: GPU)


def place(route: Route) -> str:
    return route.buffer((2, 3), torch.float32).device.type


def test_tensors_go_through_the_host_while_a_step_has_new_programs(carries_gpus: None) -> None:
    """A device that loads a kernel waits for receives that have begun, which wait for others."""
    route, places = Route(GPU), []
    for training, num_programs in [(True, 0), (True, 0), (False, 1), (False, 1), (True, 1)]:
        with route.step(training, num_programs):
            places.append(place(route))
    assert places == ["cpu", "meta", "cpu", "meta", "cpu"]


def test_a_step_that_failed_has_loaded_nothing(carries_gpus: None) -> None:
    route = Route(GPU)
    with pytest.raises(RuntimeError), route.step(True, 0):
        raise RuntimeError
    with route.step(True, 0):
        assert place(route) == "cpu"


def test_groups_of_the_cpu_carry_tensors_of_a_gpu_through_the_host() -> None:
    route = Route(GPU)
    for _ in range(3):
        with route.step(True, 0):
            assert place(route) == "cpu"


def test_what_is_sent_is_contiguous_and_conjugated() -> None:
    route = Route(torch.device("cpu"))
    value = torch.randn(3, 2, dtype=torch.complex64).mT.conj()
    sent = route.outgoing(value)
    assert sent.is_contiguous() and not sent.is_conj()
    torch.testing.assert_close(route.arrived(sent), value.resolve_conj())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.uint16, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_numbers_that_nccl_refuses_travel_as_bytes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    route = Route(torch.device("cpu"))
    value, arrived = torch.ones(shape).to(dtype), route.buffer(shape, dtype)
    carried = as_carried(arrived)
    assert carried.dtype in (torch.uint8, torch.float32)
    carried.copy_(as_carried(value))  # as a transfer does
    assert torch.equal(arrived.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


@pytest.mark.usefixtures("one_rank")
def test_an_engine_says_which_steps_have_new_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tempered(is_python=True)
    engine: Engine = engine_of(model)
    seen: list[tuple[bool, int]] = []
    enter = Route.step

    def watched(self: Route, training: bool, num_programs: int) -> Any:
        seen.append((training, num_programs))
        return enter(self, training, num_programs)

    monkeypatch.setattr(Route, "step", watched)
    step(engine)
    step(engine, 1)
    model.power = 3.0
    step(engine, 2)
    kinds, counts = zip(*seen)
    assert kinds == (True, True, True)
    assert counts[0] == counts[1] < counts[2]

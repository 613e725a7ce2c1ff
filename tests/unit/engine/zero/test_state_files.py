"""States of an optimizer in files: what is read is what was written, and a full disk says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from merak.core.errors import ArgumentsError, MerakError, TrainingError
from merak.engine.zero.host_steps import Arrived, StepInParts
from merak.engine.zero.host_tensors import HostTensors
from merak.engine.zero.state_files import StateFile
from merak.plan.optimizer import home
from tests.unit.engine.segments.test_activation_offload import engine_of

pytestmark = pytest.mark.usefixtures("one_rank")


def test_tensors_come_back_by_reads_and_by_the_map(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path))
    tensors = [torch.randn(3000), torch.randn(7, 3), torch.arange(5), torch.randn(0, 4)]
    places = [file.new(own) for own in tensors]
    file.write(list(zip(places, tensors, strict=True)))
    file.finish()
    for place, tensor, read in zip(places, tensors, file.read(places).result(), strict=True):
        assert torch.equal(place.mapped, tensor) and torch.equal(read, tensor)
    read.copy_(tensors[-1])
    assert list(tmp_path.iterdir()) == []  # the file has no name


def step_early(parts: StepInParts, arriving: list[Arrived], arrive: Any) -> None:
    """Step some tensors as beside a backward, and wait until they are."""
    parts.add(arriving, arrive)
    for future, _ in parts._running:
        future.result()
    parts.join()
    for tensor, gradient in arriving:
        tensor.grad = gradient


def trained(folder: str | None, make: Any, is_early: bool = False) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    host = HostTensors(torch.device("cpu"), folder)
    shapes = [(5, 4), (3,), (), (100, 30)]
    own = [host.copy_of(torch.randn(shape, generator=draws), torch.float32) for shape in shapes]
    optimizer = make(own)
    parts = StepInParts(optimizer, lambda *_, **__: None, host.file_states())
    parts.note_hooks()
    for _ in range(3):
        found = [(p, torch.randn(p.shape, generator=draws)) for p in own]
        if is_early:
            optimizer.zero_grad()
            assert parts.begin()
            step_early(parts, *host.copy_gradients(found[:2]))
            del found[:2]
        host.take_gradients(found)
        host.wait()
        optimizer.step()
    states = [v for p in own for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*own, *states)]


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.AdamW(own, lr=0.1, fused=True),
        lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
        lambda own: torch.optim.Adagrad(own, lr=0.1),
    ],
    ids=["adamw", "sgd", "adagrad"],
)
def test_steps_in_parts_are_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(home, "PART_BYTES", 2**40)
    whole = trained(None, make)
    monkeypatch.setattr(home, "PART_BYTES", 16)
    for folder in (None, str(tmp_path)):
        for is_early in (False, True):
            found = trained(folder, make, is_early)
            assert len(found) == len(whole) and all(map(torch.equal, found, whole))


def test_what_was_stepped_beside_the_backward_may_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(home, "PART_BYTES", 16)
    host = HostTensors(torch.device("cpu"))
    first, second = (host.copy_of(torch.ones(8), torch.float32) for _ in range(2))
    optimizer, sent = torch.optim.SGD([first, second], lr=1.0), list[tuple[int, bool]]()
    parts = StepInParts(optimizer, lambda own, is_early: sent.append((len(own), is_early)), None)
    parts.note_hooks()

    def step(change: Callable[[], None]) -> None:
        optimizer.zero_grad()
        assert parts.begin()
        step_early(parts, *host.copy_gradients([(first, torch.ones(8))]))
        host.take_gradients([(second, torch.ones(8))])
        change()
        optimizer.step()

    def change_rate() -> None:
        optimizer.param_groups[0]["lr"] = 2.0

    def change_gradient() -> None:
        assert first.grad is not None
        first.grad.mul_(2.0)

    step(lambda: None)
    assert first.tolist() == second.tolist() == [0.0] * 8 and sent == [(1, True), (1, False)]
    with pytest.raises(TrainingError, match=r"^gradients have been changed between the backward"):
        step(change_gradient)
    with pytest.raises(TrainingError, match=r"^the optimizer's options have been changed .* clip"):
        step(change_rate)
    assert not parts.begin()  # its gradients are added to
    optimizer.zero_grad()
    assert parts.begin()
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not parts.begin()  # a script's own hook belongs before the first part


def test_a_full_disk_says_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = StateFile(str(tmp_path))
    file.new(torch.zeros(2048))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TrainingError, match=r"is full: it has 8\.2 kB .* resume from the last"):
        file.new(torch.zeros(10**6))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot have a file for the optimizer's states"):
        StateFile(str(tmp_path / "file"))


class Own(torch.optim.SGD):
    """Another class, whose step may do anything."""


def test_which_jobs_are_refused(tmp_path: Path) -> None:
    engine = engine_of("gpt2", offload_optimizer=str(tmp_path))
    own = Own(engine.optimizer_params.named.values(), lr=0.1)
    with pytest.raises(ArgumentsError, match="Own is none of them; use one, such as AdamW"):
        engine.connect_optimizer(own)
    with pytest.raises(MerakError, match=r"local_steps=2 .* offload_optimizer='cpu' has it in"):
        engine_of("gpt2", offload_optimizer="cpu", local_steps=2)


def test_another_class_steps_at_once_in_host_memory() -> None:
    engine = engine_of("gpt2", offload_optimizer="cpu")
    params = engine.optimizer_params
    own = Own(params.named.values(), lr=0.1)
    engine.connect_optimizer(own)
    for tensor in params.named.values():
        tensor.grad = torch.ones_like(tensor)
    own.step()
    assert all(torch.equal(i.parameter, i.tensor) for i in params.items.values())
    assert all(i.parameter is not i.tensor for i in params.items.values())

"""Activations in host memory: what moves and comes back, and that gradients do not change."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core import mesh
from merak.core.errors import PlanError, ScheduleError, TrainingError
from merak.core.storages import MIN_OFFLOADED_BYTES
from merak.data import signature
from merak.engine.build import build_engine, forecast_of
from merak.engine.engine import Engine
from merak.engine.segments import activation_offload
from merak.engine.segments.activation_offload import (
    ActivationOffload,
    OffloadedTensors,
    reserve_host_memory,
    unpacked,
)
from merak.graph.segment.build import GraphSource
from merak.plan.cost.device import preset
from merak.plan.engine_options import EngineOptions
from merak.plan.memory.host import block_bytes
from tests.tiers import one_in
from tests.unit.engine.models import Skips, gpt2, number_batch, text_batch
from tests.unit.graph.dropped_layers import Skipping

CPU = torch.device("cpu")
LARGE = MIN_OFFLOADED_BYTES // 4
"""Numbers of float32 that are worth a copy."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Measuring the machine takes a second, and here any speeds will do.
    monkeypatch.setattr("merak.plan.layout.measure", lambda *_: preset("a100-80gb"))
    mesh.reset()
    merak.init(device="cpu")
    yield
    mesh.reset()


class Normed(nn.Module):
    """Layers whose forward writes into buffers, for images."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for convolution, norm in zip(self.convolutions, self.norms):
            x = x + torch.relu(norm(convolution(x)))
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)}


class Halved(nn.Module):
    """Reads a value of what it is given, which only Python can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if float(x.detach().abs().max()) > 100 else torch.tanh(x) * x


class Reading(nn.Module):
    """Layers, one of which is Python for autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 256), nn.Linear(256, 3)
        self.halved = Halved()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.halved(torch.tanh(self.first(x)))
        return {"loss": nn.functional.cross_entropy(self.last(hidden), y)}


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 3, 6, 6, generator=draws(seed)), "y": torch.arange(4) % 3}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "gpt2": (lambda: gpt2(dropout=0.2), lambda seed: text_batch(8, mask=True, seed=seed)),
    "skips": (Skips, lambda seed: number_batch(64, seed=seed)),
    "normed": (Normed, images),
    "reading": (Reading, lambda seed: number_batch(64, seed=seed)),
    "dropping": (Skipping, lambda seed: {"x": torch.randn(64, 4, generator=draws(seed))}),
}


def engine_of(family: str, autocast: torch.dtype | None = None, **options: Any) -> Engine:
    make, batch = MODELS[family]
    torch.manual_seed(0)
    chosen = EngineOptions(**{"num_microbatches": 3, "schedule": "gpipe", **options})
    source = GraphSource(make(), autocast=autocast)
    return build_engine(source, signature(batch(0)).columns, mesh.current_mesh(), chosen)


def train(engine: Engine, family: str, loss_scale: float = 1.0) -> list[torch.Tensor]:
    """Losses, gradients and buffers of one step."""
    batches = [MODELS[family][1](seed) for seed in range(3)]
    columns = [signature(batch).columns for batch in batches]
    losses = engine.train_step(0, columns, batches, 1 / 3, None, loss_scale)
    (stage,) = engine._state.stages.values()
    assert len(stage._saved) == 0
    found = [p.grad.clone() for p in engine.parameters.values() if p.grad is not None]
    return [losses, *found, *(buffer.clone() for buffer in engine._state.buffers.values())]


def moved_bytes(engine: Engine) -> list[int]:
    """Sizes of all copies to the host from now on."""
    offload = engine._state.stages[0].offload
    assert offload is not None
    sizes: list[int] = []
    make = offload._in_host

    def in_host(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return make(num_bytes)

    offload._in_host = in_host  # type: ignore[method-assign]
    return sizes


@one_in(4)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"recompute": "0.5"}),
        ("gpt2", {"autocast": torch.bfloat16}),
        ("gpt2", {"autocast": torch.float16, "schedule": "zero_bubble_h1"}),
        ("skips", {}),
        ("skips", {"schedule": "zero_bubble_h1"}),
        ("normed", {}),
        ("normed", {"recompute": "1,3"}),
        ("dropping", {}),
    ],
)
def test_gradients_are_the_same_to_the_last_bit(family: str, options: dict[str, Any]) -> None:
    scale = 2.0**10 if options.get("autocast") is torch.float16 else 1.0
    expected = train(engine_of(family, **options), family, scale)
    engine = engine_of(family, **options, offload_activations="full")
    sizes = moved_bytes(engine)
    found = train(engine, family, scale)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert len(sizes) >= 3 and min(sizes) >= MIN_OFFLOADED_BYTES


@pytest.mark.parametrize("family", ["gpt2", "skips", "normed"])
def test_as_much_moves_as_was_foreseen(family: str) -> None:
    make, batch = MODELS[family]
    columns = signature(batch(0)).columns
    options = EngineOptions(offload_activations="full")
    place = mesh.current_mesh()
    foreseen = forecast_of(GraphSource(make()), columns, place, options).offload_bytes()
    engine = build_engine(GraphSource(make()), columns, place, options)
    sizes = moved_bytes(engine)
    engine.train_step(0, [columns], [batch(0)], 1.0)
    # The last segment's backward comes at once, and its activations are on their way all the same.
    assert sum(sizes) == sum(foreseen.values()) > 0


@pytest.mark.parametrize("family", ["gpt2", "skips"])
def test_the_host_memory_of_a_gpu_is_pinned_before_the_first_step(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many blocks as a step holds at once: torch's allocator has each power of two apart."""
    blocks: list[Mapping[int, int]] = []
    monkeypatch.setattr(
        "merak.engine.build.reserve_host_memory", lambda _, reserved: blocks.append(reserved)
    )
    engine = engine_of(family, offload_activations="full")
    (reserved,) = blocks
    offload = engine._state.stages[0].offload
    assert offload is not None
    held: list[weakref.ref[torch.Tensor]] = []
    most: Counter[int] = Counter()
    make = offload._in_host

    def in_host(num_bytes: int) -> torch.Tensor:
        nonlocal most
        made = make(num_bytes)
        held.append(weakref.ref(made))
        alive = [one() for one in held]
        now = Counter(block_bytes(one.numel()) for one in alive if one is not None)
        most |= now
        return made

    monkeypatch.setattr(offload, "_in_host", in_host)
    train(engine, family)
    assert most == reserved and most

    made: list[int] = []
    monkeypatch.setattr(activation_offload, "_host_memory", lambda size, _: made.append(size))
    reserve_host_memory(torch.device("cuda"), reserved)
    assert Counter(made) == reserved
    reserve_host_memory(CPU, reserved)
    assert Counter(made) == reserved


class Late:
    """Copies that are made as late as anybody may wait for them; until then there is nothing."""

    def __init__(self) -> None:
        self._marks: list[list[Any]] = []

    def copy(self, pairs: Any, after: Any = ()) -> list[Any]:
        for target, _ in pairs:
            target.fill_(255)  # NaN
        self._marks.append([*after, *pairs])
        return self._marks[-1]

    def wait(self, mark: list[Any]) -> None:
        for item in mark:
            if isinstance(item, list):
                self.wait(item)
            else:
                item[0].copy_(item[1])
        mark.clear()

    def drain(self) -> None:
        for mark in self._marks:
            self.wait(mark)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1"])
def test_nothing_is_read_before_its_copy_is_complete(schedule: str) -> None:
    expected = train(engine_of("gpt2", schedule=schedule), "gpt2")
    engine = engine_of("gpt2", schedule=schedule, offload_activations="full")
    offload = engine._state.stages[0].offload
    assert offload is not None
    offload._out, offload._back = Late(), Late()
    assert all(map(torch.equal, train(engine, "gpt2"), expected))
    assert offload._back._marks and not any(offload._back._marks), "all of them were waited for"


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    engine = engine_of("gpt2", offload_activations="full")
    expected = train(engine, "gpt2")
    engine.optimizer_params.clear_gradients()

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = engine.parameters["transformer.h.0.ln_1.weight"].register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train(engine, "gpt2")
    handle.remove()
    engine.optimizer_params.clear_gradients()
    assert all(map(torch.equal, train(engine, "gpt2"), expected))


def test_what_autograd_saves_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    expected = train(engine_of("reading"), "reading")
    engine = engine_of("reading", offload_activations="full")
    assert "keep their activations on the device, since autograd runs their backwards: " in (
        caplog.text
    )
    assert all(map(torch.equal, train(engine, "reading"), expected))
    kept = [s for s in engine._state.base.stages[0].segments if s.offload is None]
    assert len(kept) == 1


@pytest.mark.parametrize("options", [{}, {"memory_budget": 600_000}])
def test_what_autograd_runs_recomputes_whole(options: dict[str, Any]) -> None:
    expected = train(engine_of("reading"), "reading")
    recompute = "auto" if options else "selective"
    engine = engine_of("reading", recompute=recompute, **options)
    (opaque,) = [s for s in engine._state.base.stages[0].segments if s.joint is None]
    assert not opaque.saved
    assert all(map(torch.equal, train(engine, "reading"), expected))


def test_views_of_one_storage_are_one_copy() -> None:
    offload, offloaded = ActivationOffload(CPU), OffloadedTensors()
    whole = torch.arange(4.0 * LARGE)
    total = whole[2:].sum() + whole.view(2, -1).t().sum()
    packed = offload.pack([whole[2:], whole.view(2, -1).t()], offloaded, [])
    offload.offload_saved(offloaded, [])
    del whole
    for _ in range(2):
        offload.segment_ended()
    (stored,) = offloaded.alive()
    assert stored.on_device is None and stored.host is not None
    assert stored.host.numel() == 16 * LARGE
    offload.fetch(offloaded)
    views = list(map(unpacked, packed))
    assert [tuple(v.shape) for v in views] == [(4 * LARGE - 2,), (2 * LARGE, 2)]
    assert views[0].untyped_storage()._cdata == views[1].untyped_storage()._cdata
    assert sum(v.sum() for v in views) == total


def test_what_two_segments_save_is_copied_once() -> None:
    offload, first, second = ActivationOffload(CPU), OffloadedTensors(), OffloadedTensors()
    shared = torch.ones(LARGE)
    packed = [offload.pack([shared], offloaded, []) for offloaded in (first, second)]
    assert first.alive() == second.alive()
    offload.offload_saved(first, [])
    offload.segment_ended()
    offload.offload_saved(second, [])
    del shared
    for _ in range(2):
        offload.segment_ended()
    offload.fetch(second)
    assert unpacked(packed.pop()[0]).sum() == LARGE
    assert first.alive()[0].on_device is not None, "it is on the device already"
    offload.fetch(first)
    assert unpacked(packed.pop()[0]).sum() == LARGE
    assert not first.alive() and not second.alive()


def test_parameters_and_small_tensors_stay() -> None:
    offload, offloaded = ActivationOffload(CPU), OffloadedTensors()
    weight = nn.Parameter(torch.ones(LARGE))
    held = torch.ones(2, LARGE)
    saved = [weight, torch.ones(LARGE - 1), held[1], 3]
    packed = offload.pack(saved, offloaded, [held])
    assert not offloaded.alive()
    assert [int(torch.as_tensor(unpacked(own)).sum()) for own in packed] == [
        LARGE,
        LARGE - 1,
        LARGE,
        3,
    ]


def test_values_that_others_hold_are_not_copied() -> None:
    offload, offloaded = ActivationOffload(CPU), OffloadedTensors()
    value = torch.ones(LARGE)
    packed = offload.pack([value], offloaded, [])
    offload.offload_saved(offloaded, [value])
    for _ in range(2):
        offload.segment_ended()
    assert offloaded.alive()[0].host is None
    offload.fetch(offloaded)
    assert torch.equal(unpacked(packed[0]), value)


@pytest.mark.parametrize("moves", [True, False])
def test_writing_into_what_was_saved_is_found(moves: bool) -> None:
    offload, offloaded = ActivationOffload(CPU), OffloadedTensors()
    value = torch.ones(LARGE if moves else 3)
    packed = offload.pack([value], offloaded, [])
    value.add_(1)
    with pytest.raises(TrainingError, match="written in place after the forward had saved it"):
        offload.offload_saved(offloaded, [])
        unpacked(packed[0])


def test_halves_are_refused() -> None:
    with pytest.raises(ScheduleError, match="sub_pipelining='on' runs them as sub-microbatches"):
        engine_of("gpt2", offload_activations="full", sub_pipelining="on")


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"schedule": "early_recompute"}])
def test_nothing_to_move_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="'full' offloads saved activations, but every seg"):
        engine_of("gpt2", offload_activations="full", **options)


def test_a_listed_segment_that_recomputes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"names segment 2 \(.*\), which recomputes and saves noth"):
        engine_of("gpt2", offload_activations="1,2", recompute="2,3")

"""The plan of a Hugging Face folder, and its files as many ranks write them, each in a thread."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from merak.checkpoint.model_files import ModelFiles, plan_model_files
from merak.checkpoint.pretrained import exchange
from merak.checkpoint.pretrained.tensor_file import TensorFile
from merak.core.errors import SavingError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, take
from merak.graph.weights.holders import TensorHolders

CPU = torch.device("cpu")
DEADLOCK_S = 60.0


@dataclass(frozen=True)
class Layout:
    """Degrees, and for each tensor its shape, its pp rank, and the dim that tp shards."""

    dp: int
    tp: int
    pp: int
    parameters: tuple[tuple[tuple[int, int], int, int | None], ...]
    buffers: tuple[tuple[int, int], ...]
    max_bytes: int
    writers: tuple[int, ...]

    def mesh(self, rank: int) -> Mesh:
        return Mesh(self.dp, self.tp, self.pp, rank, CPU, None)

    def shard(self, name: str) -> ParameterShard | None:
        if not name.startswith("p"):
            return None
        shape, _, dim = self.parameters[int(name[1:])]
        return None if dim is None or self.tp == 1 else ParameterShard(dim, (shape[dim],), self.tp)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, tp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = st.integers(1, 7)
    parameter = st.tuples(
        st.tuples(sizes, sizes), st.integers(0, pp - 1), st.sampled_from([None, 0, 1])
    )
    buffer = st.tuples(sizes, st.integers(0, pp - 1))
    ranks = st.sets(st.integers(0, dp * tp * pp - 1), min_size=1)
    return Layout(
        dp,
        tp,
        pp,
        tuple(draw(st.lists(parameter, min_size=1, max_size=12))),
        tuple(draw(st.lists(buffer, max_size=2))),
        draw(st.integers(20, 600)),
        tuple(sorted(draw(ranks))),
    )


def model_of(layout: Layout) -> nn.Module:
    model = nn.Module()
    for number, (shape, _, _) in enumerate(layout.parameters):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
    for number, (size, _) in enumerate(layout.buffers):
        model.register_buffer(f"b{number}", torch.randn(size))
    return model


def holdings_of(layout: Layout, model: nn.Module) -> dict[str, TensorHolders]:
    holdings = {}
    places = [(f"p{n}", pp) for n, (_, pp, _) in enumerate(layout.parameters)]
    places += [(f"b{n}", pp) for n, (_, pp) in enumerate(layout.buffers)]
    for name, pp_rank in places:
        tensor, shard = model.state_dict()[name], layout.shard(name)
        first = pp_rank * layout.dp * layout.tp
        ranks = tuple(range(first, first + (1 if shard is None else layout.tp)))
        holdings[name] = TensorHolders(tuple(tensor.shape), tensor.dtype, shard, ranks)
    return holdings


def tensors_of(layout: Layout, model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds; replicas differ in buffers, of which the first one's count."""
    mesh, held = layout.mesh(rank), {}
    holdings = holdings_of(layout, model)
    for name, whole in model.state_dict().items():
        if holdings[name].ranks[0] // (layout.dp * layout.tp) != mesh.pp_rank:
            continue
        shard = layout.shard(name)
        held[name] = whole if shard is None else take(whole, shard, mesh.tp_rank)
        if name.startswith("b") and rank not in holdings[name].ranks:
            held[name] = whole + 1
    return held


def plan_on(layout: Layout, model: nn.Module, rank: int) -> ModelFiles:
    holdings = holdings_of(layout, model)
    return plan_model_files(
        model, holdings, layout.mesh(rank), layout.max_bytes, writers=layout.writers
    )


# --- Ranks that are threads --------------------------------------------------------------------


@dataclass
class Wires:
    """Transfers between threads that end when both sides have met, as those of gloo."""

    mailboxes: dict[tuple[int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass
class Group:
    rank: int
    wires: Wires


@dataclass
class Transfer:
    wires: Wires
    data: torch.Tensor | None = None
    is_done: bool = False

    def wait(self) -> None:
        with self.wires.changed:
            met = self.wires.changed.wait_for(lambda: self.is_done, timeout=DEADLOCK_S)
        assert met, "two ranks wait for each other"


def isend(tensor: torch.Tensor, dst: int, group: Group) -> Transfer:
    sent = Transfer(group.wires, tensor)
    with group.wires.changed:
        _match(group.wires, (group.rank, dst), sent, is_sender=True)
    return sent


def irecv(tensor: torch.Tensor, src: int, group: Group) -> Transfer:
    received = Transfer(group.wires, tensor)
    with group.wires.changed:
        _match(group.wires, (src, group.rank), received, is_sender=False)
    return received


def _match(wires: Wires, pair: tuple[int, int], transfer: Transfer, is_sender: bool) -> None:
    waiting = wires.mailboxes[pair]
    if waiting and waiting[0][0] != is_sender:
        _, other = waiting.pop(0)
        sender, receiver = (transfer, other) if is_sender else (other, transfer)
        receiver.data.copy_(sender.data)
        transfer.is_done = other.is_done = True
        wires.changed.notify_all()
    else:
        waiting.append((is_sender, transfer))


@pytest.fixture(autouse=True)
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "isend", isend)
    monkeypatch.setattr(exchange.dist, "irecv", irecv)


def on_all(layout: Layout, function: Callable[[int, Group], Any]) -> list[Any]:
    wires = Wires()
    num_ranks = layout.dp * layout.tp * layout.pp
    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = [threads.submit(function, r, Group(r, wires)) for r in range(num_ranks)]
        return [rank.result(timeout=DEADLOCK_S) for rank in ranks]


# --- The plan ----------------------------------------------------------------------------------


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_every_tensor_is_in_one_file_of_a_rank_that_holds_most_of_it(layout: Layout) -> None:
    model = model_of(layout)
    plan = plan_on(layout, model, 0)
    assert all(plan_on(layout, model, r) == plan for r in range(layout.dp * layout.tp * layout.pp))
    assert sorted(k for keys in plan.files.values() for k in keys) == sorted(model.state_dict())
    assert plan.stored == {k: (file, k) for file, keys in plan.files.items() for k in keys}
    written = sorted(key for step in plan.steps for key in step.keys)
    assert written == sorted(model.state_dict())
    for step in plan.steps:
        assert step.writer == plan.writers[step.file]
        assert set(step.keys) <= set(plan.files[step.file])
    held = [tensors_of(layout, model, r) for r in range(layout.dp * layout.tp * layout.pp)]
    for file, keys in plan.files.items():
        whole = {key: model.state_dict()[key].nbytes for key in keys if key.startswith("p")}
        num_bytes = [
            sum(size for key, size in whole.items() if key in held[rank]) for rank in layout.writers
        ]
        writer = layout.writers.index(plan.writers[file])
        buffers = sum(model.state_dict()[key].nbytes for key in keys if key.startswith("b"))
        assert num_bytes[writer] + buffers >= 0.9 * max(num_bytes)


def test_replicas_and_shards_share_the_files() -> None:
    parameters = tuple(((4, 4), n // 8, 0 if n % 2 else None) for n in range(16))
    layout = Layout(2, 2, 2, parameters, (), 2 * 64, tuple(range(8)))
    plan = plan_on(layout, model_of(layout), 0)
    assert sorted(plan.writers.values()) == list(range(8))
    order = [step.writer for step in plan.steps]
    assert set(order[:8]) == set(range(8))  # all write at the same time


def test_what_a_rank_holds_whole_is_not_sent() -> None:
    parameters = tuple(((4, 4), n % 2, None) for n in range(8))
    layout = Layout(2, 2, 2, parameters, (), 64, tuple(range(8)))
    plan = plan_on(layout, model_of(layout), 0)
    for step in plan.steps:
        for name in step.sources:
            assert plan.held[name].senders(step.writer, layout.mesh(0)) == (step.writer,)


@pytest.mark.parametrize(
    ("num_ranks", "gigabytes", "expected"),
    [(1, 4, 1), (4, 4, 4), (16, 4, 4), (2, 4, 2), (1, 12, 3), (2, 12, 3), (4, 12, 4), (8, 0.5, 1)],
)
def test_files_are_so_many_that_all_ranks_write(
    num_ranks: int, gigabytes: float, expected: int
) -> None:
    model = nn.Module()
    for number in range(round(gigabytes * 8)):
        meta = torch.empty(125_000_000 // 4, device="meta")
        model.register_parameter(f"p{number}", nn.Parameter(meta))
    holders = TensorHolders((125_000_000 // 4,), torch.float32, None, (0,))
    holdings = dict.fromkeys(model.state_dict(), holders)
    plan = plan_model_files(model, holdings, Mesh(num_ranks, 1, 1, 0, CPU, None))
    assert len(plan.files) == expected
    assert len(set(plan.writers.values())) == min(expected, num_ranks)
    assert (plan.index is None) == (expected == 1)


# --- The files ---------------------------------------------------------------------------------


def assert_written(layout: Layout, window: int) -> None:
    model = model_of(layout)
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "WINDOW_BYTES", window)
        folder = Path(name)

        def write(rank: int, group: Any) -> list[str]:
            plan = plan_on(layout, model, rank)
            return plan.write(tensors_of(layout, model, rank), folder, group)

        by_rank = on_all(layout, write)
        plan = plan_on(layout, model, 0)
        assert {file: rank for rank, files in enumerate(by_rank) for file in files} == plan.writers
        plan.check(folder)
        found = {key: t for file in plan.files for key, t in load_file(folder / file).items()}
    assert found.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(found[key], value), key


@given(layouts(), st.sampled_from([0, 50, 2**26]))
@settings(deadline=None, max_examples=60)
def test_all_files_are_whole_in_any_layout(layout: Layout, window: int) -> None:
    assert_written(layout, window)


PARAMETERS = tuple(((6, 4), n % 2, n % 3 if n % 3 < 2 else None) for n in range(12))
SIX = Layout(1, 3, 2, PARAMETERS, ((3, 1),), 200, tuple(range(6)))


def test_a_rank_that_cannot_write_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(SIX)
    close, failing = TensorFile.close, plan_on(SIX, model, 0).writers
    first = next(iter(failing))

    def fail_on_first(file: TensorFile) -> None:
        if Path(file._file.name).name == first:
            raise OSError(28, "No space left on device")
        close(file)

    monkeypatch.setattr(TensorFile, "close", fail_on_first)

    def write(rank: int, group: Any) -> str | None:
        try:
            plan_on(SIX, model, rank).write(tensors_of(SIX, model, rank), tmp_path, group)
        except SavingError as error:
            return str(error)
        return None

    by_rank = on_all(SIX, write)  # there is no process group here to tell the others
    assert [rank for rank, message in enumerate(by_rank) if message] == [failing[first]]
    assert "The model could not be saved in" in by_rank[failing[first]]
    assert "No space left on device" in by_rank[failing[first]]


@pytest.mark.parametrize("damage", ["absent", "shape", "dtype", "meta"])
def test_a_tensor_that_is_not_as_planned_is_named(tmp_path: Path, damage: str) -> None:
    layout = replace(SIX, dp=1, tp=1, pp=1, writers=(0,), parameters=(((2, 3), 0, None),))
    layout = replace(layout, buffers=())
    model = model_of(layout)
    tensors = tensors_of(layout, model, 0)
    changes = {
        "absent": {},
        "shape": {"p0": tensors["p0"][:1]},
        "dtype": {"p0": tensors["p0"].double()},
        "meta": {"p0": tensors["p0"].to("meta")},
    }
    with pytest.raises(SavingError, match=r"rank 0 does not hold p0, of shape \(2, 3\)"):
        plan_on(layout, model, 0).write(changes[damage], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_after_it_was_written_is_found(tmp_path: Path) -> None:
    layout = replace(SIX, tp=1, pp=1, writers=(0,), buffers=())
    layout = replace(layout, parameters=tuple((s, 0, None) for s, _, _ in PARAMETERS))
    model = model_of(layout)
    plan = plan_on(layout, model, 0)
    files = plan.write(tensors_of(layout, model, 0), tmp_path)
    plan.write_companions(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*files, "model.safetensors.index.json"}
    plan.check(tmp_path)
    cut = tmp_path / files[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(OSError, match=rf"{files[1]} has [\d,]+ bytes of [\d,]+"):
        plan.check(tmp_path)

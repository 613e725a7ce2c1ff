"""Replicas give each other what they have stepped while the next forward begins."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import merak
from merak.core.mesh import largest
from merak.engine.segments import joint_call
from merak.engine.step import step_checks
from merak.engine.zero.param_all_gather import ParamAllGather
from tests.multirank.ranks import RankPool
from tests.multirank.test_zero import make, share
from tests.tiers import slow

PATIENCE_S = 300.0


def small(layout: tuple[int, int, int], zero: int = 1) -> Any:
    """A model whose parameters travel alone."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    return make(layout, torch.float32, zero=zero, bucket_bytes=1)


class Late:
    """A gather that a slow link carries once a file exists; the rank itself goes on meanwhile."""

    def __init__(self, begun: Path, gather: Callable[[], Any]) -> None:
        self._begun, self._gather, self.work = begun, gather, self
        self._made = ThreadPoolExecutor(1).submit(self._make)

    def _make(self) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not self._begun.exists():
            assert time.monotonic() < deadline, "the first segment waits for the last one's bucket"
            time.sleep(0.01)
        return self._gather()

    def wait(self) -> None:
        made = self._made.result()
        made.work.wait()
        self.everything = made.everything


def late(folder: str) -> list[tuple[str, int]]:
    """Replica 1 sends its last bucket when replica 0 has begun the next forward, not before.

    What hosts ask each other travels in a group of its own, as it does beside NCCL.
    """
    parallel = small((2, 1, 1))
    of_hosts = dist.new_group()
    rank, begun = parallel.engine.mesh.dp_rank, Path(folder) / "begun"
    gather, wait, call = ParamAllGather._gather, ParamAllGather._wait, joint_call._end_forward
    last = parallel.engine.optimizer_params._param_all_gather._buckets[-1]
    events: list[tuple[str, int]] = []
    is_next = False

    def gather_late(self: Any, bucket: Any, group: Any) -> Any:
        if rank == 0 or bucket is not last:
            return gather(self, bucket, group)
        return Late(begun, lambda: gather(self, bucket, group))

    def noted(self: Any, number: int) -> None:
        events.append(("wait", number))
        wait(self, number)

    def run(program: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(program, *args, **kwargs)
        events.append(("segment", program.segment.index))
        if is_next and rank == 0:
            begun.touch()
        return outputs

    with (
        mock.patch.object(ParamAllGather, "_gather", gather_late),
        mock.patch.object(ParamAllGather, "_wait", noted),
        mock.patch.object(joint_call, "_end_forward", run),
        mock.patch.object(step_checks, "largest", lambda asked, _: largest(asked, of_hosts)),
    ):
        parallel.step(share(0, torch.float32))
        is_next = True
        events.clear()
        parallel.step(share(1, torch.float32))
    return events


def test_a_forward_does_not_wait_for_what_later_segments_read(
    pool: RankPool, tmp_path: Path
) -> None:
    for events in pool.run(late, 2, str(tmp_path)):
        forward = events[: events.index(("segment", 0), events.index(("segment", 0)) + 1)]
        waits = [number for kind, number in forward if kind == "wait"]
        first = forward.index(("segment", 0))
        assert waits == sorted(waits) and len(waits) > 4
        assert 0 < len([kind for kind, _ in forward[:first] if kind == "wait"]) < len(waits)
        assert forward.index(("wait", waits[-1])) > forward.index(("segment", 1))


READERS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda model: dict(model.state_dict()),
    "parameters": lambda model: dict(model.named_parameters()),
    "attribute": lambda model: {"first.weight": model.first.weight},
    "copy": lambda model: dict(copy.deepcopy(model).named_parameters()),
}


def read(name: str) -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whether something was under way; what a reader of the model found; what there is."""
    parallel = small((2, 1, 1), zero=2)
    parallel.step(share(0, torch.float32))
    under_way = len(parallel.engine.optimizer_params._param_all_gather._open) > 0
    found = {n: t.detach().clone() for n, t in READERS[name](parallel.model).items()}
    return under_way, found, {n: p.detach() for n, p in parallel.engine.parameters.items()}


@pytest.mark.parametrize("name", [n if n == next(iter(READERS)) else slow(n) for n in READERS])
def test_whoever_reads_the_model_finds_it_whole(pool: RankPool, name: str) -> None:
    (_, _, first), (under_way, found, second) = pool.run(read, 2, name)
    assert under_way
    for key, value in found.items():
        if key in first:  # a tied parameter has one name in the engine
            assert torch.equal(value, first[key]) and torch.equal(value, second[key]), key
    assert set(found) & set(first)

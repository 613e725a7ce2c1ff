"""Parameters in shares: who is gathered when, and what a rank owes that gives a step up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from merak.engine.health.status import Progress
from merak.engine.health.step_records import clock_of
from merak.engine.zero import unshard_order as under_test
from merak.engine.zero.unshard_order import Unshard, UnshardOrder

CPU = torch.device("cpu")
SIZES = {"a": 1, "b": 2, "tied": 3, "frozen": 4}
NAMES = {size: name for name, size in SIZES.items()}


class Short(Exception):
    """Memory runs out."""


class Rank:
    """One replica; its collectives are written down, and memory is short before one of them.

    Args:
        most: so many begin before memory runs out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 10**6) -> None:
        self.most = most
        self.log: list[str] = []
        self.at_computations: list[int] = []
        self.num_over = 0
        monkeypatch.setattr(under_test, "others_of", lambda group: (1,))
        group: Any = None
        self.order = UnshardOrder(group, CPU, Progress(clock_of(CPU), 0))
        self.order.collectives = self  # type: ignore[assignment]
        self.modules = {name: Fake(name, self, trains=name != "frozen") for name in SIZES}
        forward = [("tied",), ("a", "frozen"), ("b", "tied")]
        rows = [(names, False) for names in forward]
        rows += [(names, True) for names in reversed(forward)]
        self.steps = [Unshard(tuple(self.modules[n] for n in names), back) for names, back in rows]

    def all_gather(self, every: torch.Tensor, one: torch.Tensor, group: object) -> None:
        assert every.numel() == 2 * one.numel()
        self.log.append(NAMES[one.numel()])

    def reduce_scatter(self, one: torch.Tensor, every: torch.Tensor, group: object) -> None:
        assert every.numel() == 2 * one.numel()
        self.log.append(f"sum {NAMES[one.numel()]}")

    def begin(self, what: str) -> None:
        if len(self.log) == self.most:
            raise Short
        self.log.append(what)
        self.order.count_collective()

    def run(self) -> None:
        """Every turn; as torch does, a backward sums what it meets last first."""
        self.order.start(self.steps)
        for unshard in self.steps:
            self.order.mark()
            self.order.begin(unshard.modules)
            assert all(module.is_whole for module in self.modules_of(unshard))
            self.at_computations.append(len(self.log))
            for module in reversed(self.modules_of(unshard)) if unshard.is_backward else ():
                if module.trains:
                    self.begin(f"sum {module.name}")
            self.order.end(unshard.modules)
            self.num_over += 1

    def abort_step(self) -> None:
        """The rest, from the marked turn on, in name only."""
        self.order.rewind()
        for unshard in self.steps[self.num_over :]:
            self.order.begin(unshard.modules, drained=True)
            self.order.end(unshard.modules, drained=True)

    def modules_of(self, unshard: Unshard) -> tuple[Any, ...]:
        return unshard.modules


@dataclass(eq=False)
class Fake:
    """What is gathered together."""

    name: str
    rank: Rank
    trains: bool
    degree: int = 2
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    is_whole: bool = False
    num_elements: int = 0

    def __post_init__(self) -> None:
        self.num_elements = SIZES[self.name]

    def unshard(self, async_op: bool = False) -> None:
        if not self.is_whole:
            self.rank.begin(self.name)
            self.is_whole = True

    def reshard(self) -> None:
        self.is_whole = False


WHOLE = [
    "tied", "a", "frozen",  # the first turn has its own, and the next one's set out
    "b", "tied",
    "b", "tied", "a", "frozen",  # the same segment backward; what it used was freed
    "sum tied", "sum b", "tied",
    "sum a", "sum tied",
]  # fmt: skip


def test_what_comes_next_sets_out_before_a_segment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.run()
    # The collectives that have begun when each of the six turns computes.
    assert rank.at_computations == [3, 5, 5, 9, 12, 13]
    assert rank.log == WHOLE


@pytest.mark.parametrize("most", range(len(WHOLE)))
def test_a_rank_that_gives_up_anywhere_owes_the_rest(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    rank = Rank(monkeypatch, most)
    with pytest.raises(Short):
        rank.run()
    rank.abort_step()
    assert rank.log == WHOLE


def test_sums_without_a_gradient_are_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    back = rank.steps[-1]
    rank.order.start([back])
    rank.order.begin(back.modules)
    rank.order.end(back.modules)
    assert rank.log == ["tied", "sum tied"] and not rank.modules["tied"].is_whole

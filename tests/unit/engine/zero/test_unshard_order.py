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
NAMES = ("a", "b", "tied", "frozen")


class Short(Exception):
    """Memory runs out."""


class Rank:
    """One replica; its collectives are written down, and memory is short before one of them.

    Args:
        most: so many begin before memory runs out.
        splits: whether backwards leave gradients for later, but for the tied one.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, most: int = 10**6, splits: bool = False
    ) -> None:
        self.most = most
        self.log: list[str] = []
        self.at_computations: list[int] = []
        self.open_then: list[list[str]] = []
        self.num_over = 0
        monkeypatch.setattr(under_test, "others_of", lambda group: (1,))
        self.order = UnshardOrder(Progress(clock_of(CPU), 0))
        self.groups = {name: Fake(name, self, trains=name != "frozen") for name in NAMES}
        forward = [("tied",), ("a", "frozen"), ("b", "tied")]
        back = list(reversed(forward))
        at_once = ("tied",) if splits else ("a", "b", "tied")
        rows = [(names, ()) for names in forward]
        rows += [(names, tuple(n for n in names if n in at_once)) for names in back]
        if splits:
            rows += [((), ("b",)), ((), ("a",))]
        self.steps = [
            Unshard(*(tuple(map(self.groups.get, names)) for names in row)) for row in rows
        ]

    def begin(self, what: str) -> None:
        if len(self.log) == self.most:
            raise Short
        self.log.append(what)

    def run(self) -> None:
        """Every turn."""
        self.order.start(self.steps)
        for unshard in self.steps:
            self.order.mark()
            self.order.begin(unshard.groups)
            assert all(group.is_whole for group in self.groups_of(unshard))
            self.at_computations.append(len(self.log))
            self.open_then.append([n for n, group in self.groups.items() if group.is_reducing])
            self.end(unshard)
            self.num_over += 1
        self.order.take_reductions()

    def end(self, unshard: Unshard, drained: bool = False) -> None:
        if unshard.groups:
            self.order.end(unshard.groups, drained)
        else:
            self.order.reduce(unshard.reduced, drained)

    def abort_step(self) -> None:
        """The rest, from the marked turn on, in name only."""
        self.order.rewind()
        for unshard in self.steps[self.num_over :]:
            self.order.begin(unshard.groups, drained=True)
            self.end(unshard, drained=True)

    def groups_of(self, unshard: Unshard) -> tuple[Any, ...]:
        return unshard.groups


@dataclass(eq=False)
class Fake:
    """What is gathered together."""

    name: str
    rank: Rank
    trains: bool
    group: Any = None
    is_gathering: bool = False
    is_whole: bool = False
    is_reducing: bool = False

    def begin_gather(self) -> None:
        assert not self.is_gathering and not self.is_whole
        self.rank.begin(self.name)
        self.is_gathering = True

    def unshard(self) -> None:
        self.is_whole, self.is_gathering = self.is_whole or self.is_gathering, False

    def reshard(self) -> None:
        self.is_whole = False

    def begin_reduction(self) -> None:
        assert not self.is_reducing
        self.rank.begin(f"sum {self.name}")
        self.is_reducing = True

    def take_reduction(self) -> None:
        self.is_reducing = False

    def join(self, is_reduction: bool) -> None:
        self.rank.log.append(f"sum {self.name}" if is_reduction else self.name)


WHOLE = [
    "tied", "a", "frozen",  # the first turn has its own, and the next one's set out
    "b", "tied",
    "a", "frozen",  # beside the last segment's backward, whose parameters are still there
    "sum b", "sum tied", "tied",
    "sum a", "sum tied",
]  # fmt: skip

SPLIT = [*WHOLE[:7], "sum tied", "tied", "sum tied", "sum b", "sum a"]


def test_what_comes_next_sets_out_before_a_segment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.run()
    # The collectives that have begun when each of the six turns computes.
    assert rank.at_computations == [3, 5, 5, 7, 10, 11]
    assert rank.log == WHOLE
    assert not any(group.is_whole or group.is_reducing for group in rank.groups.values())


def test_sums_are_open_while_the_next_segment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.run()
    assert rank.open_then == [[], [], [], [], ["b", "tied"], ["a"]]


def test_gradients_that_are_left_for_later_are_summed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, splits=True)
    rank.run()
    assert rank.log == SPLIT
    assert rank.open_then[-2:] == [["tied"], ["b"]]
    assert not any(group.is_whole or group.is_reducing for group in rank.groups.values())


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("most", range(len(WHOLE)))
def test_a_rank_that_gives_up_anywhere_owes_the_rest(
    monkeypatch: pytest.MonkeyPatch, most: int, splits: bool
) -> None:
    rank = Rank(monkeypatch, most, splits)
    with pytest.raises(Short):
        rank.run()
    rank.abort_step()
    assert rank.log == (SPLIT if splits else WHOLE)

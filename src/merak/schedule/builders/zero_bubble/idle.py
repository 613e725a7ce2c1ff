"""Weight gradients in the idle moments of given orders of forwards and input gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from merak.schedule.ir import Action, Kind


@dataclass(slots=True)
class _Rank:
    """State of one rank while its list is made."""

    ahead: deque[Action]
    num_stages: int
    most_in_flight: int
    weights: deque[Action] = field(default_factory=deque)
    in_flight: int = 0
    actions: list[Action] = field(default_factory=list)

    def choose(self, done: Collection[Action]) -> Action | None:
        """The next F or I if it can run, else the oldest W that waits."""
        if self.ahead and self._is_ready(self.ahead[0], done):
            return self.ahead[0]
        return self.weights[0] if self.weights else None

    def _is_ready(self, action: Action, done: Collection[Action]) -> bool:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            has_input = not stage or Action(kind, stage - 1, microbatch) in done
            return has_input and self.in_flight < self.most_in_flight
        if stage + 1 < self.num_stages:
            return Action(kind, stage + 1, microbatch) in done
        return Action(Kind.FORWARD, stage, microbatch) in done

    def perform(self, action: Action) -> None:
        """Append an action to the list."""
        self.actions.append(action)
        if action.kind is Kind.WEIGHT_GRADIENT:
            self.weights.popleft()
            self.in_flight -= 1
            return
        self.ahead.popleft()
        if action.kind is Kind.FORWARD:
            self.in_flight += 1
        else:
            weights = Action(Kind.WEIGHT_GRADIENT, action.stage, action.microbatch)
            self.weights.append(weights)


def with_weights_in_idle_moments(
    orders: Iterable[Sequence[Action]], num_stages: int, most_in_flight: int
) -> list[list[Action]]:
    """Every rank's list: its F and I in the order given, and a W wherever the next has to wait.

    An F or I waits for another rank, or for memory, in a run where every action takes one moment.

    Args:
        orders: F and I of every rank, in orders that can run.
        num_stages: of the single pipe.
        most_in_flight: microbatches on a rank, counted once a stage, from the F to the W; at least
            as many as an order has in flight between F and I.
    """
    ranks = [_Rank(deque(order), num_stages, most_in_flight) for order in orders]
    done: set[Action] = set()
    while any(rank.ahead or rank.weights for rank in ranks):
        moment = [(rank, rank.choose(done)) for rank in ranks]
        assert any(action is not None for _, action in moment), "orders that cannot run"
        for rank, action in moment:
            if action is not None:
                rank.perform(action)
                done.add(action)
    return [rank.actions for rank in ranks]

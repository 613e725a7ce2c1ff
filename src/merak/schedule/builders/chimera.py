"""Chimera: pipelines in both directions over the same ranks, merged without conflict."""

from __future__ import annotations

from dataclasses import dataclass

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import check_counts
from merak.schedule.ir import FINAL_KINDS, Action, Kind, Schedule

_METHODS = ("direct", "forward_doubling", "backward_halving")


@dataclass(frozen=True, slots=True)
class _Placed:
    """An action, the rank it runs on, and its slot; a forward and a backward are one slot each."""

    slot: int
    rank: int
    action: Action


def chimera(
    num_ranks: int,
    num_microbatches: int,
    *,
    pairs: int = 1,
    method: str = "direct",
    recompute: bool | None = None,
    eager_middle: bool = False,
) -> Schedule:
    """Build Chimera with 2f pipes: f down the ranks and f up.

    A unit of P microbatches (or what is left of the iteration) is spread over the pipes as evenly
    as can be; units follow one another without a gap. `forward_doubling` and `backward_halving`
    have units of 2P microbatches whose forwards go two by two, so that with B = 2F a pair of
    forwards fills the slot of a backward. A pair's halves stay actions of their own, so the second
    half's transfer is not held up by the first.

    Args:
        num_ranks: pipeline degree P, even; a rank holds 2f stages.
        num_microbatches: microbatches per iteration; with `backward_halving`, of the halved size.
        pairs: f, a divisor of P / 2.
        method: how more than P microbatches are scheduled: direct (concatenation),
            forward_doubling or backward_halving.
        recompute: save only stage inputs. Unless given, only forward_doubling does, which holds
            twice the microbatches.
        eager_middle: reduce the middle stages' gradients eagerly too, though no bubble hides it.

    Raises:
        ScheduleError: P is odd, f divides no P / 2, or the method is unknown.

    Source: arXiv 2107.06925 (Chimera), sections 3.1 (merging), 3.2 (eager reductions except for the
        middle stages), 3.5 (more microbatches) and 3.6 (more pipes).
    """
    _check(num_ranks, num_microbatches, pairs, method)
    pipes = _pipes(num_ranks, pairs)
    placed: list[_Placed] = []
    microbatch_pipes: list[int] = []
    slot = 0
    while len(microbatch_pipes) < num_microbatches:
        left = num_microbatches - len(microbatch_pipes)
        width = 1 if method == "direct" or left < 2 * num_ranks else 2
        members = _spread(min(left, width * num_ranks), len(pipes), width)
        first = len(microbatch_pipes)
        placed.extend(_unit(pipes, members, slot, first, width))
        microbatch_pipes.extend(members)
        # A unit keeps a rank busy for P slots of forwards and P or 2P of backwards.
        slot += (1 + width) * num_ranks
    recompute = method == "forward_doubling" if recompute is None else recompute
    lists = _by_rank(placed, num_ranks)
    eager = (True,) * num_ranks if eager_middle else _eager(lists)
    return Schedule(
        name="chimera",
        pipes=pipes,
        microbatch_pipes=tuple(microbatch_pipes),
        actions=tuple(tuple(p.action for p in own) for own in lists),
        recompute=(recompute,) * num_ranks,
        eager_reduction=eager,
        microbatches_per_update=num_microbatches,
    )


def _check(num_ranks: int, num_microbatches: int, pairs: int, method: str) -> None:
    check_counts("chimera", num_ranks, num_microbatches)
    if num_ranks % 2:
        nearest = " or ".join(str(n) for n in (num_ranks - 1, num_ranks + 1) if n)
        raise ScheduleError(
            f"chimera merges pipelines of both directions and is defined for an even number of "
            f"stages; got {num_ranks}. Use {nearest}."
        )
    divisors = [f for f in range(1, num_ranks // 2 + 1) if num_ranks // 2 % f == 0]
    if pairs not in divisors:
        raise ScheduleError(
            f"chimera with {num_ranks} stages is defined for pairs that divide {num_ranks // 2}; "
            f"got {pairs}. Use one of {', '.join(map(str, divisors))}."
        )
    if method not in _METHODS:
        raise ScheduleError(f"chimera has no method {method!r}; use {', '.join(_METHODS)}.")


def _pipes(num_ranks: int, pairs: int) -> tuple[tuple[int, ...], ...]:
    """Down pipe i starts at rank i P / f; the up pipe beside it takes the ranks in reverse."""
    ranks = tuple(range(num_ranks))
    starts = range(0, num_ranks, num_ranks // pairs)
    downs = [ranks[start:] + ranks[:start] for start in starts]
    return tuple(pipe for down in downs for pipe in (down, down[::-1]))


def _spread(num_microbatches: int, num_pipes: int, width: int) -> list[int]:
    """The pipe of each of a unit's microbatches; pairs of forwards stay on one pipe."""
    num_places = -(-num_microbatches // width)
    base, extra = divmod(num_places, num_pipes)
    shares = [base + (pipe < extra) for pipe in range(num_pipes)]
    members = [pipe for pipe, share in enumerate(shares) for _ in range(share * width)]
    return members[:num_microbatches]


def _unit(
    pipes: tuple[tuple[int, ...], ...], members: list[int], slot: int, first: int, width: int
) -> list[_Placed]:
    """One unit's actions, starting at a slot.

    Place j of a pipe has its forward on stage s in slot s + 2j and its backwards in slot
    2P - 1 - s + 2j, and P slots later for the second of a pair. Opposite pipes take slots of
    opposite parity on every rank, because P is even; pipes of one direction follow one another.
    """
    num_stages = len(pipes[0])
    result = []
    for pipe, ranks in enumerate(pipes):
        own = [first + i for i, member in enumerate(members) if member == pipe]
        for i, microbatch in enumerate(own):
            place, half = divmod(i, width)
            for stage, rank in enumerate(ranks):
                forward = slot + stage + 2 * place
                backward = slot + 2 * num_stages - 1 - stage + 2 * place + half * num_stages
                result.append(_Placed(forward, rank, Action(Kind.FORWARD, stage, microbatch)))
                result.append(_Placed(backward, rank, Action(Kind.BACKWARD, stage, microbatch)))
    return result


def _by_rank(placed: list[_Placed], num_ranks: int) -> list[list[_Placed]]:
    lists: list[list[_Placed]] = [[] for _ in range(num_ranks)]
    for one in placed:
        lists[one.rank].append(one)
    # Only the two forwards of a pair share a slot; the sort is stable and keeps their order.
    return [sorted(own, key=lambda one: one.slot) for own in lists]


def _eager(lists: list[list[_Placed]]) -> tuple[bool, ...]:
    """Eager-reduction flags: stages with an idle slot after their gradients are complete.

    The middle stages have no such slot: their reduction would only slow the last actions down.
    """
    eager = [True] * len(lists)
    for own in lists:
        complete = {p.action.stage: p.slot for p in own if p.action.kind in FINAL_KINDS}
        busy = [p.slot for p in own]
        for stage, slot in complete.items():
            after = [s for s in busy if s > slot]
            if after and len(after) == after[-1] - slot:
                eager[stage] = False
    return tuple(eager)

"""Results of a search: plans, fastest first, and the candidates that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price

Refusal = Callable[[Candidate], str | None]
"""Says why a job cannot have a layout; None where it can."""


NO_PIPELINE = "no pipeline"
"""Kind of the plans with pp=1."""


class Cause(Enum):
    """Cause of a rejection, by which rejections are merged for people."""

    STATE = "state"
    MEMORY = "memory"
    REFUSED = "refused"
    SAVED = "saved"
    SLOWER = "slower"
    UNPRICED = "unpriced"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rejection of one candidate.

    Args:
        candidate: what is rejected.
        cause: the kind of rule.
        why: a clause for people.
        excess: how far it is from being acceptable; of several, the one with the least is shown.
    """

    candidate: Candidate
    cause: Cause
    why: str
    excess: float = 0.0


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected region of the space, for people to read.

    Args:
        what: the choices that its candidates share, such as "tp=8".
        why: the reason, such as "91 GiB on pp rank 0 of 80 GiB".
        count: candidates in it; 0 where they were never listed.
    """

    what: str
    why: str
    count: int = 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Result of a search.

    Args:
        plans: those that fit, fastest first.
        rejected: regions of the space, each with a reason.
        behind: the others that were priced and fit.
        fits_nowhere: those priced that do not fit, the nearest to its devices' memory first.
        num_candidates: size of the space.
        num_priced: candidates that were priced.
        is_proved: whether no candidate outside of `plans` can be faster than the first plan.
        refusal: why the model or the options allow none of the candidates, where that is so.
        notes: what tensor parallel degrees of the space leave whole on every rank.
    """

    plans: tuple[Price, ...]
    rejected: tuple[Rejected, ...]
    behind: tuple[Price, ...] = ()
    fits_nowhere: tuple[Price, ...] = ()
    num_candidates: int = 0
    num_priced: int = 0
    is_proved: bool = True
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def priced(self) -> tuple[Price, ...]:
        """Prices of all plans that fit, fastest first."""
        return tuple(sorted((*self.plans, *self.behind), key=lambda own: own.step_s))

    @property
    def kinds(self) -> Mapping[str, Price]:
        """The fastest plan of every schedule, fastest first; "no pipeline" is one of them."""
        found = dict[str, Price]()
        for own in self.priced:
            kind = own.candidate.schedule if own.candidate.pp > 1 else NO_PIPELINE
            found.setdefault(kind, own)
        return found

    def of_other_kinds(self, most: int = 3) -> str:
        """How much longer the fastest plans of other kinds take, such as "gpipe +4%"; "" of none.

        Args:
            most: kinds that are named.
        """
        best = self.priced[0]
        others = [(kind, own) for kind, own in self.kinds.items() if own is not best]
        return ", ".join(f"{k} +{own.step_s / best.step_s - 1:.0%}" for k, own in others[:most])

"""The microbatch alone: the fastest of those that fit, with as many samples a step."""

from __future__ import annotations

import pytest

from merak.core.errors import PlanError
from merak.engine.planning.choose import fastest_microbatch
from merak.plan.price.candidate import Candidate
from tests.unit.plan.search.doubles import Double

LAYOUT = Candidate(num_microbatches=32, recompute="off")


def test_the_fastest_microbatch_that_fits_is_chosen() -> None:
    double = Double(device_bytes=90 + 40 * 4)  # state and four samples; larger ones are faster
    chosen = fastest_microbatch(LAYOUT, double.price, lambda _: None).candidate
    assert (chosen.microbatch, chosen.num_microbatches) == (4, 8)
    assert [own.microbatch for own in double.priced] == [1, 2, 4, 8]  # none after the first misfit


def test_a_microbatch_divides_the_samples_of_a_step() -> None:
    chosen = fastest_microbatch(
        Candidate(num_microbatches=6, recompute="off"),
        Double(device_bytes=1e9).price,
        lambda _: None,
    )
    assert (chosen.candidate.microbatch, chosen.candidate.num_microbatches) == (2, 3)


def test_what_fits_nowhere_says_how_much_it_takes() -> None:
    with pytest.raises(
        PlanError, match=r"no microbatch that fits: one of 1 takes 130 B of 91 B; use rec"
    ):
        fastest_microbatch(LAYOUT, Double(device_bytes=91).price, lambda _: None)


def test_what_the_job_refuses_is_passed_over() -> None:
    def refusal(own: Candidate) -> str | None:
        return "too few" if own.num_microbatches < 16 else None

    chosen = fastest_microbatch(LAYOUT, Double(device_bytes=1e9).price, refusal).candidate
    assert chosen.microbatch == 2
    with pytest.raises(PlanError, match="finds no microbatch that fits: never"):
        fastest_microbatch(LAYOUT, Double().price, lambda _: "never")

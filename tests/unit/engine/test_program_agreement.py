"""Ranks that would run different programs are refused, and named."""

from __future__ import annotations

import pytest

from merak.core.errors import PlanError
from merak.engine.program_agreement import Digests, check_digests


def test_ranks_of_other_stages_hold_other_segments() -> None:
    check_digests([Digests("j", {0: "a"}), Digests("j", {0: "a"}), Digests("j", {1: "b"})])


def test_a_segment_that_differs_is_named() -> None:
    ranks = [Digests("j", {0: "a"}), Digests("j", {1: "b"}), Digests("j", {1: "c"})]
    with pytest.raises(PlanError, match=r"^Ranks 1 and 2 have derived .* for segment 1, so that"):
        check_digests(ranks)


def test_another_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^Ranks 0 and 1 have planned different stages"):
        check_digests([Digests("j", {0: "a"}), Digests("k", {1: "b"})])

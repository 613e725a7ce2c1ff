"""Halves and shares of the sequence are not taken together."""

import pytest

from merak.core.errors import PlanError
from merak.plan.layout import EngineOptions
from merak.plan.sub_pipelining import wish_for_halves


def test_halves_are_refused_on_shares_of_the_sequence() -> None:
    both = EngineOptions(sub_pipelining="on", sequence_parallel=True)
    with pytest.raises(PlanError, match=r"hides all-reduces, of which sequence_parallel=True"):
        wish_for_halves(both)
    assert wish_for_halves(EngineOptions(sequence_parallel=True)) == "off"
    assert wish_for_halves(EngineOptions(sub_pipelining="on")) == "on"

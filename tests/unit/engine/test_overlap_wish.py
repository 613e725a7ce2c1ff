"""Halves and shares of the sequence are not taken together."""

import pytest

from merak.core.errors import PlanError
from merak.plan.engine_options import EngineOptions
from merak.plan.sub_pipelining import requested_sub_pipelining


def test_halves_are_refused_on_shares_of_the_sequence() -> None:
    both = EngineOptions(sub_pipelining="on", sequence_parallel=True)
    with pytest.raises(PlanError, match=r"hides all-reduces, of which sequence_parallel=True"):
        requested_sub_pipelining(both)
    assert requested_sub_pipelining(EngineOptions(sequence_parallel=True)) == "off"
    assert requested_sub_pipelining(EngineOptions(sub_pipelining="on")) == "on"

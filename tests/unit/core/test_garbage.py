"""Python looks for no reference cycles while graphs are made, and does so again afterwards."""

from __future__ import annotations

import gc

import pytest

from merak.core.garbage import paused_collector


@pytest.fixture(autouse=True)
def unfrozen():
    """Objects that a test froze are looked at again behind it."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


def test_the_collector_rests_and_works_again():
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_wakes_it():
    with pytest.raises(ValueError, match="here"), paused_collector():
        raise ValueError("here")
    assert gc.isenabled()


def test_what_was_made_is_left_out_where_the_process_ends():
    before = gc.get_freeze_count()
    with paused_collector(process_ends=True):
        made = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with paused_collector(process_ends=True):
        pass
    assert not gc.isenabled()

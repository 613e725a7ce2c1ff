"""Traits of schedules: formulas agree with simulation, and any schedule has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from merak.core.errors import ScheduleError
from merak.schedule import registry
from merak.schedule.ir import Schedule
from merak.schedule.serialize import to_text
from merak.schedule.traits import Traits, traits_of


def numbers(own: Traits) -> tuple[object, ...]:
    rounded = pytest.approx(own.bubble), pytest.approx(own.in_flight)
    flags = own.splits_backwards, own.is_fifo, own.joins_ends, own.is_synchronous
    return own.num_stages, *rounded, *flags


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (6, 12)])
@pytest.mark.parametrize(("name", "options"), list(registry.searched()))
def test_a_formula_is_what_the_simulator_finds(
    name: str, options: dict[str, object], ranks: int, microbatches: int
) -> None:
    said = registry.traits(name, ranks, microbatches, options)
    assert numbers(said) == numbers(traits_of(registry.build(name, ranks, microbatches, **options)))


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_a_formula_holds_with_fewer_microbatches_than_ranks(name: str) -> None:
    for ranks in range(2, 9):
        for microbatches in range(1, 2 * ranks + 2):
            said = registry.traits(name, ranks, microbatches, {})
            built = registry.build(name, ranks, microbatches)
            assert numbers(said) == numbers(traits_of(built)), (ranks, microbatches)


@pytest.mark.parametrize("name", registry.names())
def test_a_formula_is_defined_where_the_schedule_is(name: str) -> None:
    for ranks, microbatches in ((1, 1), (2, 3), (3, 2), (4, 4), (4, 6)):
        try:
            built: Schedule | str = registry.build(name, ranks, microbatches)
        except ScheduleError as error:
            built = str(error)
        if isinstance(built, Schedule):
            own = registry.traits(name, ranks, microbatches, {})
            assert own.num_stages == built.num_stages
            continue
        with pytest.raises(ScheduleError) as refused:
            registry.traits(name, ranks, microbatches, {})
        assert str(refused.value) == built


def test_first_in_first_out_is_read_from_the_lists() -> None:
    found = {name for name in registry.names() if registry.traits(name, 4, 8, {}).is_fifo}
    assert found == {"gpipe", "1f1b", "pipedream", "pipedream_2bw"}
    several = {
        name for name in registry.names() if not registry.traits(name, 4, 8, {}).is_synchronous
    }
    assert several == {"pipedream", "pipedream_2bw"}


def test_a_file_has_the_traits_of_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(to_text(registry.build("zero_bubble_v", 2, 4)))
    own = registry.traits(str(path), 2, 4, {})
    assert numbers(own) == numbers(registry.traits("zero_bubble_v", 2, 4, {}))
    with pytest.raises(ScheduleError, match="for 2 ranks and 4 microbatches; asked for 2 and 5"):
        registry.traits(str(path), 2, 5, {})
    path.write_text(to_text(registry.build("gpipe", 2, 4)) + "\n")
    assert registry.traits(str(path), 2, 4, {}).is_fifo


@pytest.fixture
def own_names() -> Iterator[None]:
    """Leave no registered name behind."""
    before = dict(registry._BUILDERS)
    yield
    registry._BUILDERS.clear()
    registry._BUILDERS.update(before)


def flushed(num_ranks: int, num_microbatches: int, *, width: int = 1) -> Schedule:
    if num_ranks % 2:
        raise ValueError(f"made for even numbers of ranks, not {num_ranks}")
    return registry.build("gpipe", num_ranks, num_microbatches + (width - 1))


def test_an_own_builder_is_a_schedule_like_others(own_names: None) -> None:
    registry.register("flushed", flushed)
    assert "flushed" in registry.names()
    assert registry.resolve("flushed", 2, 3).num_microbatches == 3
    assert registry.traits("flushed", 2, 3, {}) == registry.traits("gpipe", 2, 3, {})
    with pytest.raises(ScheduleError, match="flushed: made for even numbers of ranks, not 3"):
        registry.traits("flushed", 3, 3, {})
    with pytest.raises(ScheduleError, match="flushed is for 2 ranks and 4 microbatches; asked"):
        registry.build("flushed", 2, 3, width=2)
    with pytest.raises(ScheduleError, match="option width is 'two'; give a whole number"):
        registry.traits("flushed", 2, 3, {"width": "two"})


@pytest.mark.parametrize("name", ["1f1b", "auto", "own.txt", "some/where"])
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="is a schedule already, or a file; register another"):
        registry.register(name, flushed)

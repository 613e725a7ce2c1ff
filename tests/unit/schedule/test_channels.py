"""Transfers that share a communicator, which runs those of a rank one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.core.errors import ScheduleError
from merak.schedule.builders.forward_only import forward_only
from merak.schedule.catalog import FORMULAS
from merak.schedule.lower import lower
from merak.schedule.registry import build, resolve
from merak.schedule.steps import Link, Payload, channel_of, links_of, links_of_pipe
from merak.schedule.validate.steps import serial_channels_complete

NUM_RANKS = range(2, 9)

EVALUATION = """
name: mine
microbatches: 1
pipes: 0 2 3 1 0
rank 0: 0F0 4F0 4B0 0B0
rank 1: 3F0 3B0
rank 2: 1F0 1B0
rank 3: 2F0 2B0
"""


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_transfers_of_a_channel_complete_one_after_another(name: str) -> None:
    """In training and in evaluations of the same stages, whatever the number of microbatches."""
    for num_ranks in NUM_RANKS:
        for num_microbatches in (1, 2, 3, num_ranks, 2 * num_ranks):
            try:
                schedule = build(name, num_ranks, num_microbatches)
            except ScheduleError:
                continue
            assert not list(serial_channels_complete(schedule, lower(schedule)))
            evaluation = forward_only(schedule.pipes[0], num_ranks, num_microbatches)
            assert not list(serial_channels_complete(evaluation, lower(evaluation)))


def test_an_evaluation_hangs_where_one_direction_is_one_channel() -> None:
    """Stages go round the ranks: 0 → 1 and 1 → 2 wait for one another's turn on rank 1."""
    evaluation = forward_only((0, 1, 2, 0, 1, 2), 3, 4)
    steps = lower(evaluation)
    found = list(
        serial_channels_complete(evaluation, steps, lambda k: (k.payload, k.sender < k.receiver))
    )
    assert found
    assert "as over NCCL, rank 0 hangs at step" in found[0]
    assert not list(serial_channels_complete(evaluation, steps))


ACROSS = """
name: mine
microbatches: {count}
pipes: 2 0 1 3 2
rank 0: {middle1}
rank 1: {middle2}
rank 2: {ends}
rank 3: {middle3}
"""


def across(path: Path, order: str, count: int) -> Path:
    """A schedule whose rank 0 meets 2 and 1, and rank 3 meets 1 and 2, in one channel."""
    actions = {
        f"middle{stage}": " ".join(f"{stage}{one}" for one in order.split()) for stage in (1, 2, 3)
    }
    ends = " ".join(f"0F{m} 4F{m} 4B{m} 0B{m}" for m in range(count))
    path.write_text(ACROSS.format(count=count, ends=ends, **actions), encoding="utf-8")
    return path


@pytest.mark.parametrize(("order", "count"), [("F0 B0", 1), ("F0 B0 F1 B1", 2)])
def test_a_file_whose_order_nccl_cannot_keep_is_refused(
    tmp_path: Path, order: str, count: int
) -> None:
    """Every transfer meets its mirror, but those of a rank's two neighbours are one queue."""
    path = across(tmp_path / "mine.txt", order, count)
    sentence = "as over NCCL, rank 0 hangs at step .*; change the order, or put consecutive stages"
    with pytest.raises(ScheduleError, match=sentence):
        resolve(str(path), 4, count)


def test_a_file_whose_evaluation_nccl_cannot_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(EVALUATION, encoding="utf-8")
    with pytest.raises(ScheduleError, match="in an evaluation of 2 microbatches, if transfers of"):
        resolve(str(path), 4, 1)


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zero_bubble_v"])
def test_a_rank_has_one_neighbour_in_a_channel(name: str) -> None:
    links = links_of(lower(build(name, 8, 16)))
    for rank in range(8):
        for channel in {channel_of(link) for link in links}:
            own = {
                frozenset((link.sender, link.receiver))
                for link in links
                if channel_of(link) == channel and rank in (link.sender, link.receiver)
            }
            assert len(own) <= 1


def test_links_of_a_forward_go_from_stage_to_stage() -> None:
    activation = Payload.ACTIVATION
    assert links_of_pipe((0, 1, 1, 0)) == {Link(activation, 0, 1), Link(activation, 1, 0)}

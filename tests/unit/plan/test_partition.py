import pytest

from merak.core.errors import PlanError
from merak.plan.partition import Partition, from_cuts, from_sizes, move_to_fit
from merak.schedule.registry import build


def test_a_partition_tells_segments_of_stages_and_stages_of_segments():
    partition = Partition(7, (2, 3))
    assert partition.num_stages == 3
    assert partition.stages == (range(0, 2), range(2, 3), range(3, 7))
    assert partition.sizes == (2, 1, 4)
    assert [partition.stage_of(segment) for segment in range(7)] == [0, 0, 1, 2, 2, 2, 2]


def test_cuts_and_sizes_say_the_same():
    assert from_cuts([2, 3], 7) == from_sizes([2, 1, 4], 7) == Partition(7, (2, 3))
    assert from_cuts([], 7) == from_sizes([7], 7) == Partition(7, ())


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([3, 3], r"cuts \[3, 3\] do not increase"),
        ([3, 2], r"cuts \[3, 2\] do not increase"),
        ([0, 2], r"cuts \[0, 2\] do not fit a model of 5 segments; every cut lies between 1 and 4"),
        ([2, 5], r"cuts \[2, 5\] do not fit a model of 5 segments; every cut lies between 1 and 4"),
        ([2.5], r"cuts \[2.5\] are not all whole numbers"),
        ([True], r"cuts \[True\] are not all whole numbers"),
    ],
)
def test_wrong_cuts_are_refused(cuts, message):
    with pytest.raises(PlanError, match=message):
        from_cuts(cuts, 5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], r"per stage \[\] leave a stage empty"),
        ([5, 0], r"per stage \[5, 0\] leave a stage empty"),
        ([6, -1], r"per stage \[6, -1\] leave a stage empty"),
        ([2.0, 3], r"per stage \[2.0, 3\] leave a stage empty"),
        ([2, 2], r"per stage \[2, 2\] add up to 4, but the model has 5 segments; make them"),
        ([4, 2], r"per stage \[4, 2\] add up to 6, but the model has 5 segments; make them"),
    ],
)
def test_wrong_sizes_are_refused(sizes, message):
    with pytest.raises(PlanError, match=message):
        from_sizes(sizes, 5)


@pytest.mark.parametrize(
    ("schedule", "options", "sizes", "most", "moved"),
    [
        ("1f1b", {}, (28, 28, 28, 26), 139, (27, 28, 28, 27)),
        ("1f1b", {}, (30, 32, 25, 25), 146, (29, 31, 26, 26)),  # two ranks at once
        ("1f1b", {}, (31, 20, 20, 20), 148, (29, 20, 20, 22)),  # one after another
        ("1f1b", {}, (28, 28, 28, 26), 130, None),  # too far
        ("1f1b", {}, (28, 36, 36, 36), 138, None),  # there is no room
        (
            "interleaved_1f1b",
            {"chunks": 2},
            (9, 8, 8, 8, 9, 8, 8, 6),
            86,
            (8, *[8] * 3, 9, 8, 8, 7),
        ),
    ],
)
def test_segments_are_moved_to_ranks_with_room(schedule, options, sizes, most, moved):
    built = build(schedule, 4, 8, **options)

    def filled(partition):
        held = [sum(partition.sizes[n] for n in built.stages_of(rank)) for rank in range(4)]
        return [own * weight / most for own, weight in zip(held, (5.0, 4.6, 4.0, 3.8))]

    found = move_to_fit(from_sizes(sizes, sum(sizes)), built, filled)
    assert (None if found is None else found.sizes) == moved

import pytest

from merak.core.errors import PlanError
from merak.plan.partition import Partition, from_cuts, from_sizes


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

from __future__ import annotations

from merak.plan.tied_parameters import Holder, Reader, find_holders


def test_a_parameter_of_one_segment_has_no_holders() -> None:
    readers = [Reader(0, 0, 0, ("a", "b")), Reader(1, 1, 1, ("c",))]
    assert find_holders(readers) == {}


def test_holders_are_ordered_from_the_last_reader_to_the_owner() -> None:
    readers = [
        Reader(rank=0, stage=0, segment=0, parameters=("embedding", "own")),
        Reader(rank=1, stage=1, segment=4, parameters=("embedding",)),
        Reader(rank=3, stage=3, segment=9, parameters=("embedding", "head")),
    ]
    assert find_holders(readers) == {
        "embedding": (Holder(3, 9, 9, 3), Holder(1, 4, 4, 1), Holder(0, 0, 0, 0))
    }


def test_readers_on_one_rank_make_one_holder() -> None:
    readers = [Reader(0, 0, 2, ("w",)), Reader(0, 0, 0, ("w",)), Reader(1, 1, 3, ("w",))]
    assert find_holders(readers) == {"w": (Holder(1, 3, 3, 1), Holder(0, 0, 2, 0))}


def test_a_rank_of_several_stages_holds_with_its_lowest() -> None:
    # Interleaved: rank 0 has stages 0 and 2, rank 1 has stages 1 and 3.
    readers = [Reader(0, 0, 0, ("w",)), Reader(1, 1, 1, ("w",)), Reader(0, 2, 2, ("w",))]
    assert find_holders(readers) == {"w": (Holder(1, 1, 1, 1), Holder(0, 0, 2, 0))}

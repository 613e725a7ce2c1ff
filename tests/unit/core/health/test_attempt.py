"""Agreement on the attempt, by ranks as threads over one store that outlives attempts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from merak.core.errors import MeshError
from merak.core.health.attempt import ANSWER, JOINED, NONCES, NUMBER, agree_on_attempt


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def agreed(store: Store, num_ranks: int, order: list[int] | None = None) -> set[int]:
    """The numbers that ranks, started one after another, have agreed on."""
    with ThreadPoolExecutor(num_ranks) as ranks:
        coming = [
            ranks.submit(agree_on_attempt, store.clone(), rank, num_ranks, 60.0)  # type: ignore[attr-defined]
            for rank in order or range(num_ranks)
        ]
        return {found.result() for found in coming}


def test_every_attempt_has_a_number_of_its_own(store: Store) -> None:
    assert agreed(store, 3) == {1}
    assert agreed(store, 3, [2, 1, 0]) == {2}
    assert agreed(store, 1) == {3}
    assert agreed(store, 4, [3, 0, 2, 1]) == {4}


def test_what_an_attempt_left_that_was_cut_off_in_its_agreement(store: Store) -> None:
    # Rank 1 had come, rank 0 had taken a number and answered; rank 2 never came.
    store.add(NUMBER, 1)
    store.append(f"{JOINED}/1", "0\n1\n")
    store.append(NONCES, "rank0\nrank1\n")
    store.set(f"{ANSWER}/rank1", "1")
    assert agreed(store, 3) == {2}
    assert store.get(f"{JOINED}/1") == b"0\n1\n"


def test_an_answer_of_a_former_rank_0_is_not_taken(store: Store) -> None:
    """It is cut off from its agent, and answers a rank of the next attempt too."""
    store.add(NUMBER, 1)
    written = threading.Event()

    def answer() -> None:
        nonces = ""
        while not nonces:
            nonces = store.get(NONCES).decode() if store.check([NONCES]) else ""
        store.add(NUMBER, 1)  # the new rank 0 has begun
        store.set(f"{ANSWER}/{nonces.strip()}", "1")
        written.set()

    former = threading.Thread(target=answer)
    former.start()
    with pytest.raises(MeshError, match="for rank 0 to join"):
        agree_on_attempt(store.clone(), 1, 2, 1.0)  # type: ignore[attr-defined]
    former.join()
    assert written.is_set()
    assert agreed(store, 2) == {3}


def test_a_rank_that_does_not_come_is_named(store: Store) -> None:
    with pytest.raises(MeshError, match=r"rank 0 has waited 0\.1 s for ranks 1, 2 to join the job"):
        agree_on_attempt(store, 0, 3, 0.1)
    with pytest.raises(MeshError, match=r"rank 2 has waited 0\.1 s for rank 0 to join the job"):
        agree_on_attempt(store, 2, 3, 0.1)
    assert store.add(NUMBER, 0) == 1

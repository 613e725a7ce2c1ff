from __future__ import annotations

import pytest
import torch

from merak.core.errors import TrainingError
from merak.engine.health.oom import OomGuard, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_hosts_allocator_says_so_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_what_others_wait_for_is_made_after_all() -> None:
    oom_guard, released, attempts = OomGuard(is_armed=True), [], iter(range(3))

    def make() -> str:
        if next(attempts) == 0:
            raise torch.OutOfMemoryError("full")
        return "made"

    oom_guard.start_step(lambda: released.append(oom_guard.reason))
    assert oom_guard.allocate(make) == "made"
    assert released == ["full"] and oom_guard.reason == "full"
    oom_guard.start_step(lambda: None)
    assert oom_guard.reason is None


def test_where_no_step_may_be_given_up_the_error_passes() -> None:
    def make() -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        OomGuard().allocate(make)


def test_memory_that_is_short_without_activations_ends_the_job() -> None:
    def make() -> None:
        raise torch.OutOfMemoryError("full")

    oom_guard = OomGuard(is_armed=True)
    with pytest.raises(TrainingError, match="use a larger pp or tp, or zero=1"):
        oom_guard.allocate(make)
    # Nothing may take it for an error of an action, and perform the rest of that anew.
    try:
        oom_guard.allocate(make)
    except TrainingError as error:
        assert not oom_guard.handles(error)

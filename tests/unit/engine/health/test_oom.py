from __future__ import annotations

import pytest
import torch

from merak.core.errors import TrainingError
from merak.core.mesh import Mesh
from merak.core.units import size
from merak.engine.health import oom
from merak.engine.health.oom import OomGuard, is_out_of_memory
from merak.plan.memory.non_tensor import non_tensor_memory


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


def test_the_sentence_says_what_a_gpu_holds_beside_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh(1, 1, 2, 0, torch.device("cuda"), None)
    monkeypatch.setattr(oom, "has_mesh", lambda: True)
    monkeypatch.setattr(oom, "current_mesh", lambda: mesh)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 75 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 77 * 10**9)
    with pytest.raises(TrainingError) as caught, oom.explain_oom("step 3", "use pp=4"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    expected = non_tensor_memory(80 * 10**9, mesh)
    assert str(caught.value) == (
        "step 3 ran out of memory (CUDA out of memory; of the GPU's 80.0 GB, 4.0 GB held no tensor "
        "of this rank, 2.0 GB of it gaps of torch's allocator; expected were "
        f"{size(expected.total)}: {expected}); use pp=4."
    )


def test_the_cpu_has_no_such_memory() -> None:
    assert oom.outside_tensors() == ""

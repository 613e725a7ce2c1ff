"""Out of memory inside a training step: the rank aborts the step, and not the job.

Other ranks wait for what this one sends and reduces. So it frees the step's activations, and joins
the communication of the rest of the step with zeros (`merak.engine.step.drain`). At the step's end
all ranks learn that it was aborted, and run it again with a plan that needs less memory
(`merak.engine.oom_replan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from merak.core.errors import TrainingError
from merak.core.mesh import Mesh, current_mesh, has_mesh, largest
from merak.core.units import size
from merak.plan.memory.non_tensor import non_tensor_memory

_Made = TypeVar("_Made")


class StepAborted(Exception):
    """Some rank ran out of memory in a step; raised on every rank.

    Args:
        reasons: by pp rank, the message of the error there.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("memory ran out")
        self.reasons = reasons


class OomGuard:
    """Catches out-of-memory errors of the step that runs, and aborts the step.

    Args:
        is_armed: whether a step may be aborted; else errors pass.
    """

    def __init__(self, is_armed: bool = False) -> None:
        self.is_armed = is_armed
        self.reason: str | None = None
        self._release: Callable[[], None] = _nothing

    def start_step(self, release: Callable[[], None]) -> None:
        """Reset the guard, for a step that begins.

        Args:
            release: frees the activations that this rank holds for the step.
        """
        self.reason = None
        self._release = release

    def handles(self, error: BaseException) -> bool:
        """Whether an error is one that aborts a step."""
        return self.is_armed and is_out_of_memory(error)

    def abort_step(self, reason: str) -> None:
        """Abort the step, and free its activations.

        Called when the error is no longer handled: it holds what the frames that it passed hold.

        Args:
            reason: the message of the error.
        """
        if self.reason is None:
            self.reason = reason
        self._release()
        torch.cuda.empty_cache()

    def allocate(self, make: Callable[[], _Made]) -> _Made:
        """Call a function that needs memory and that other ranks wait for; free memory if it fails.

        Args:
            make: may be called twice; its result in a step that is aborted is not used.
        """
        try:
            return make()
        except Exception as error:
            if not self.handles(error):
                raise
            reason = str(error)
        self.abort_step(reason)
        with self.no_retry():
            return make()

    @contextmanager
    def no_retry(self) -> Iterator[None]:
        """Context in which an out-of-memory error ends the job, as the activations have been freed.

        Communication for others has then been done in part, and can't be begun anew.

        Raises:
            TrainingError: memory ran out.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"memory ran out ({error}{outside_tensors()}) although all activations of the step "
                f"had been freed before ({self.reason}); use a larger pp or tp, or zero=1 or more, "
                "so that a rank holds fewer parameters, gradients and states."
            ) from error


def outside_tensors() -> str:
    """Bytes of this rank's GPU without a tensor, as the end of a sentence; empty on the CPU."""
    if not has_mesh() or current_mesh().device.type != "cuda":
        return ""
    mesh = current_mesh()
    free, total = torch.cuda.mem_get_info(mesh.device)
    held = torch.cuda.memory_allocated(mesh.device)
    reserved = torch.cuda.memory_reserved(mesh.device)
    expected = non_tensor_memory(total, mesh)
    return (
        f"; of the GPU's {size(total)}, {size(total - free - held)} held no tensor of this rank, "
        f"{size(reserved - held)} of it gaps of torch's allocator; expected were "
        f"{size(expected.total)}: {expected}"
    )


@contextmanager
def explain_oom(what: str, fix: str) -> Iterator[None]:
    """Context that turns an out-of-memory error into one that says what to do.

    Args:
        what: the noun that ran out of memory, the beginning of a sentence.
        fix: the end of it.

    Raises:
        TrainingError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        others = outside_tensors()
        raise TrainingError(f"{what} ran out of memory ({error}{others}); {fix}.") from error


OPTIMIZER_FIX = (
    "some of its parameters may have been stepped already, so that it cannot be run again; use "
    "zero=1 or more, whose replicas share its states, a larger pp or tp, or an optimizer with "
    "less state"
)
"""The fix for an optimizer that runs out of memory."""


def raise_if_aborted(oom_guard: OomGuard, mesh: Mesh) -> None:
    """Tell all ranks whether one of them has aborted the step; every rank calls it together.

    Raises:
        StepAborted: one has; on every rank.
    """
    own = None if oom_guard.reason is None else (mesh.pp_rank, oom_guard.reason)
    errors: list[Any] = [own]
    if mesh.device_mesh is not None:
        if not any(largest([own is not None], None)):
            return
        errors = [None] * mesh.world_size
        dist.all_gather_object(errors, own)
    reasons = dict(found for found in errors if found is not None)
    if reasons:
        raise StepAborted(reasons)


_NO_MEMORY = (
    "can't allocate memory",  # the CPU's allocator
    "CUDA error: out of memory",  # what is allocated past torch's allocator: pinned memory, say
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _nothing() -> None:
    pass

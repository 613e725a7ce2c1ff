"""Accelerate in single-process mode, inside a job of many ranks.

Merak reduces gradients and hands out data itself, so each rank's `transformers.Trainer` must
believe that it is the only process: no DistributedDataParallel, no sharded loader, and gather is
the identity. Accelerate decides by the variables of the launcher, so those are hidden from it. It
is told the rank afterwards, by which scripts choose the process that prints, writes and uploads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import (  # type: ignore[import-untyped]
    AcceleratorState,
    PartialState,
)

from merak.core.errors import ArgumentsError
from merak.core.mesh import current_mesh

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "ACCELERATE_USE_CPU",
)
"""Environment variables by which Accelerate counts ranks and chooses a device."""

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""The device that Accelerate takes without looking further."""

REFUSED_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "merak.init(dp=…, tp=…, pp=…)",
    "ACCELERATE_USE_FSDP": "merak.init(dp=…, tp=…, pp=…)",
    "ACCELERATE_USE_MEGATRON_LM": "merak.init(dp=…, tp=…, pp=…)",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "merak.init(dp=…, tp=…, pp=…)",
    "ACCELERATE_MIXED_PRECISION": "single precision",
    "ACCELERATE_DYNAMO_BACKEND": "no compilation",
}
"""Options of `accelerate launch` that Merak cannot honour, and what to use instead."""


@contextmanager
def single_process_accelerate() -> Iterator[None]:
    """Hide the launcher's variables, so that Accelerate built inside sees one process.

    Accelerate's device is the one that `merak.init` chose. The variables are back afterwards.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: `accelerate launch` requests something that Merak cannot honour.
    """
    device = current_mesh().device
    _refuse_launch_options()
    names = (*LAUNCHER_VARIABLES, DEVICE_VARIABLE)
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[DEVICE_VARIABLE] = str(device)
    try:
        yield
        _tell_rank()
    finally:
        del os.environ[DEVICE_VARIABLE]
        os.environ.update(saved)


def _tell_rank() -> None:
    """Let Accelerate's states know the rank, so that one process of the job is the main one."""
    rank = current_mesh().rank
    for state in (PartialState, AcceleratorState):
        if state._shared_state:
            state._shared_state.update(process_index=rank, local_process_index=rank)


def fresh_state() -> PartialState:
    """Make Accelerate's process state anew: one process, on this rank's device.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: `accelerate launch` requests something that Merak cannot honour.
    """
    with single_process_accelerate():
        AcceleratorState._reset_state(reset_partial_state=True)
        return PartialState(cpu=current_mesh().device.type == "cpu")


def configured_state() -> PartialState:
    """Return Accelerate's process state as the script has made it.

    Raises:
        ArgumentsError: it has made none.
    """
    if not PartialState._shared_state:
        raise ArgumentsError(
            "accelerator_config.use_configured_state=True takes Accelerate's state as it is, but "
            "there is none; make an Accelerator or a PartialState before the training arguments."
        )
    return PartialState()


def _refuse_launch_options() -> None:
    for name, instead in REFUSED_VARIABLES.items():
        value = os.environ.get(name, "")
        if value.lower() not in ("", "0", "no", "false"):
            raise ArgumentsError(
                f"the environment variable {name}={value} cannot be honoured; use {instead}, "
                "and start the script with torchrun instead of `accelerate launch`."
            )

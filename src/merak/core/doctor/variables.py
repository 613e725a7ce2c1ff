"""Environment variables that break jobs or slow them down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from merak.core.doctor.finding import Judgement, System, fine, problem, warning

ON = ("1", "true", "yes", "on", "y")

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables of launchers that start ranks."""

PLACE = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that every rank has beside RANK."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A variable that is rarely wanted.

    Args:
        name: of the variable.
        applies: tells by its value whether it does something.
        effect: what it does.
        fix: what to do.
    """

    name: str
    applies: Callable[[str], bool]
    effect: str
    fix: str = ""


def _is_on(value: str) -> bool:
    return value.strip().lower() in ON


def _is_verbose(value: str) -> bool:
    return value.strip().upper() in ("INFO", "TRACE", "ABORT")


_OFFLINE = "nothing is downloaded: models and data must be in folders here or in the cache"
_ONLINE = "unset it where a model or a dataset is to be downloaded"
_DETOUR = "NCCL does not use {}, so links are many times slower where there are some"
_OWN_LAUNCH = "start the job with torchrun, not with `accelerate launch` and its configuration"

RULES = (
    Rule("CUDA_LAUNCH_BLOCKING", _is_on, "every kernel waits for the one before", ""),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "every tensor asks the driver for memory"),
    Rule("NCCL_DEBUG", _is_verbose, "every rank prints what NCCL does", "set it to WARN"),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.strip().upper() == "DETAIL",
        "every collective is checked by another one, which is slow",
    ),
    Rule("NCCL_P2P_DISABLE", _is_on, _DETOUR.format("NVLink and PCIe between GPUs of a host")),
    Rule("NCCL_IB_DISABLE", _is_on, _DETOUR.format("InfiniBand and RoCE")),
    Rule("NCCL_SHM_DISABLE", _is_on, _DETOUR.format("shared memory inside a host")),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _is_on, "the host waits for every collective of NCCL"),
    Rule("HF_HUB_OFFLINE", _is_on, _OFFLINE, _ONLINE),
    Rule("TRANSFORMERS_OFFLINE", _is_on, _OFFLINE, _ONLINE),
    Rule("HF_DATASETS_OFFLINE", _is_on, _OFFLINE, _ONLINE),
    Rule("ACCELERATE_USE_DEEPSPEED", _is_on, "accelerate prepares for DeepSpeed", _OWN_LAUNCH),
    Rule("ACCELERATE_USE_FSDP", _is_on, "accelerate prepares for its own FSDP", _OWN_LAUNCH),
)
"""One row for each variable that is a warning by itself."""


def read_variables(system: System) -> Mapping[str, str]:
    """Environment variables of a system.

    Args:
        system: whose environment it is.
    """
    return system.environment


def check_variables(own: Mapping[str, str]) -> Iterator[Judgement]:
    """Check for variables that break jobs or slow them down."""
    judged = list(_ranks(own))
    for rule in RULES:
        value = own.get(rule.name)
        if value is not None and rule.applies(value):
            fix = rule.fix or f"unset {rule.name} unless you look for a fault"
            judged.append(warning(f"{rule.name}={value}: {rule.effect}", fix))
    yield from judged or [fine("none that breaks jobs or slows them down")]


def _ranks(own: Mapping[str, str]) -> Iterator[Judgement]:
    """Variables of ranks that no launcher has set for this process."""
    if "RANK" in own:
        missing = [name for name in PLACE if not own.get(name)]
        if missing:
            yield problem(
                f"RANK={own['RANK']} is set, but {' and '.join(missing)} not: left over from "
                "another job",
                "unset RANK, WORLD_SIZE and LOCAL_RANK, or start the job with torchrun",
            )
        elif not any(name in own for name in LAUNCHERS):
            yield warning(
                f"RANK={own['RANK']} and WORLD_SIZE={own['WORLD_SIZE']} are set, but not by "
                "torchrun or Slurm; the job waits until so many processes have started",
                "unset RANK and WORLD_SIZE if they are left over, or start the job with torchrun",
            )
    elif own.get("WORLD_SIZE", "1") != "1":
        yield problem(
            f"WORLD_SIZE={own['WORLD_SIZE']} is set without RANK, so this process takes itself "
            "for a job of that size",
            "unset WORLD_SIZE, or start the job with torchrun",
        )

"""Request of `merak plan`, checked before anything is traced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merak.cli.options import TypedRequest, check_counts, job_options, option, words
from merak.core.elastic import GivenDegrees
from merak.core.errors import CommandError
from merak.plan.cost.data_sheets import SHEETS
from merak.plan.options import LAYOUT, PRICED

if TYPE_CHECKING:
    from merak.plan.search.pinned import Pinned

_DEGREES = (*GivenDegrees._fields, "microbatch")
_PINNED = " Pinned; else it is searched."


@dataclass(frozen=True, kw_only=True)
class PlanRequest(TypedRequest):
    """Request for the fastest plans of a job on devices that need not be here."""

    cluster: str = option(
        MISSING,
        "--cluster",
        "C",
        "Such as h100:8x4 (device, devices a node, nodes), or a file.",
        **words(SHEETS),
    )
    global_batch: int | None = option(
        None, "--global-batch", "N", "Samples of a step of the job; those of the recipe."
    )
    sequence: int | None = option(
        None,
        "--seq",
        "S",
        "Tokens of a sequence; needed where the model reads sequences and is no recipe's.",
    )
    dp: int | None = option(None, "--dp", "D", f"Data parallel degree.{_PINNED}")
    tp: int | None = option(None, "--tp", "T", f"Tensor parallel degree.{_PINNED}")
    pp: int | None = option(None, "--pp", "P", f"Pipeline parallel degree.{_PINNED}")
    ep: int | None = option(
        None,
        "--ep",
        "E",
        f"Expert parallel degree: that of tp, or of replicas.{_PINNED}",
    )
    cp: int | None = option(None, "--cp", "C", f"Context parallel degree.{_PINNED}")
    microbatch: int | None = option(
        None, "--microbatch", "B", f"Samples of a microbatch of one replica.{_PINNED}"
    )
    pins: Mapping[str, Any] = job_options(*LAYOUT, is_open=True)
    optimizer: str = option("AdamW", "--optimizer", "CLASS", "Of torch.optim.")
    common: Mapping[str, Any] = job_options(*PRICED)
    top: int = option(5, "--top", "K", "Plans to show.")
    explain: bool = option(False, "--explain", "", "Say what was left out, and why.")
    what_if: bool = option(
        False,
        "--what-if",
        "",
        "Plan again with more devices, fewer, a slower network, a larger batch.",
    )
    price_per_device_hour: float | None = option(
        None, "--price-per-device-hour", "DOLLARS", "Of one device; the cluster file may have it."
    )
    output: Path | None = option(None, "--output", "FILE.json", "Write the first plan there.")
    page: Path | None = option(
        None, "--page", "FILE.html", "Write a page: timeline, memory, frontier of time and memory."
    )


def pinned_of(request: PlanRequest) -> Pinned:
    """The choices that a request pins.

    Raises:
        CommandError: one is none, or they contradict each other.
    """
    from merak.plan.search.pinned import Pinned

    _check_counts(request)
    _check_folders(request)
    pins = dict(request.pins)
    _check_words(pins)
    if pins["schedule_options"] and pins["schedule"] is None:
        name, value = next(iter(pins["schedule_options"].items()))
        raise CommandError(f"--option {name}={value} is of a schedule; name --schedule too.")
    if pins["sub_pipelining"] == "on" and pins["sequence_parallel"]:
        raise CommandError(
            "--sub-pipelining on hides all-reduces, of which --sequence-parallel leaves none; use "
            "one of the two."
        )
    left = {"sub_pipelining": "auto", "offload_activations": "off"}  # as if they were left out
    pins |= {name: None for name, word in left.items() if pins[name] == word}
    return Pinned(**{name: getattr(request, name) for name in _DEGREES}, **pins)


def _check_counts(request: PlanRequest) -> None:
    check_counts(request, "global_batch", "sequence", "top", *_DEGREES)
    price = request.price_per_device_hour
    if price is not None and not (0 <= price < math.inf):
        raise CommandError(f"--price-per-device-hour {price} is no price; use 0 or more.")


def _check_words(pins: Mapping[str, Any]) -> None:
    """Refuse words that no option knows.

    Raises:
        MerakError: one is unknown; the sentence lists those that are known.
    """
    from merak.core.errors import ScheduleError, did_you_mean
    from merak.plan.activations.offload import parse_offload
    from merak.plan.recompute_spec import parse_recompute
    from merak.schedule import registry

    parse_recompute(pins["recompute"])
    parse_offload(pins["offload_activations"])
    schedule = pins["schedule"]
    if schedule is None or registry.is_file(schedule):
        return
    known = registry.options(schedule)
    for name in pins["schedule_options"]:
        if name not in known:
            meant = did_you_mean(name, known)
            fix = f"; it takes {', '.join(known) or 'none'}." if meant == "." else meant
            raise ScheduleError(f"--option {name} is unknown to {schedule}{fix}")


def _check_folders(request: PlanRequest) -> None:
    """Refuse a file that cannot be written before minutes of planning, not after them."""
    for flag, file in (("--output", request.output), ("--page", request.page)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{flag} {file}: there is no folder {file.parent}; make it first.")

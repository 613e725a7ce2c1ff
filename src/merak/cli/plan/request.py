"""Request of `merak plan`, checked before anything is traced."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merak.cli.options import (
    autocast,
    check_reductions,
    given,
    json_output,
    option,
    parameter_dtype,
    recipe_settings,
    shared,
    words,
)
from merak.core.files.json_file import parse_value
from merak.launch.errors import CommandError
from merak.plan.cost.data_sheets import SHEETS
from merak.schedule.registry import names as schedules

if TYPE_CHECKING:
    from merak.plan.search.pinned import Pinned

_PINNED = " Pinned; else it is searched."


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Request for the fastest plans of a job on devices that need not be here."""

    model: str = option(
        MISSING,
        "--model",
        "M",
        "transformers class name, a folder or file with a config.json, or a recipe.",
    )
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
    settings: list[str] = recipe_settings()
    config: str | None = option(
        None, "--config", "JSON", "Fields of the config to change, as an object."
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
    schedule: str | None = option(
        None, "--schedule", "NAME", f"Pipeline schedule.{_PINNED}", **words(schedules())
    )
    options: list[str] | None = option(
        None, "--option", "KEY=VALUE", "Of the pinned schedule; repeatable."
    )
    recompute: str | None = option(
        None, "--recompute", "WHAT", f"off, selective, full, auto or a fraction.{_PINNED}"
    )
    zero: int | None = option(None, "--zero", "0|1|2|3", f"Stage of ZeRO.{_PINNED}")
    sequence_parallel: bool | None = option(
        None, "--sequence-parallel/--no-sequence-parallel", "", f"Shard the sequence.{_PINNED}"
    )
    sub_pipelining: str | None = option(
        None, "--sub-pipelining", "on|off", f"Hide all-reduces of tp.{_PINNED}"
    )
    offload: str | None = option(
        None, "--offload", "WHAT", "Activations that are offloaded: full, a fraction. None else."
    )
    partition: str | None = option(
        None, "--partition", "N,…", "Segments of every stage, such as 5,7,7,7; else balanced."
    )
    dtype: str | None = parameter_dtype()
    autocast: str | None = autocast()
    optimizer: str = option("AdamW", "--optimizer", "CLASS", "Of torch.optim.")
    master_weights: bool = option(
        False, "--master-weights", "", "Float32 masters of parameters of a lower precision."
    )
    gradient_sums: str = shared("gradient_sums")
    gradient_compression: str = shared("gradient_compression")
    hierarchical_reductions: str = shared("hierarchical_reductions")
    tied_gradients: str = shared("tied_gradients")
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
    trust_remote_code: bool = option(
        False, "--trust-remote-code", "", "Run code that is in the model's folder."
    )
    as_json: bool = json_output()
    given: frozenset[str] = given()


def pinned_of(request: PlanRequest) -> Pinned:
    """The choices that a request pins.

    Raises:
        CommandError: one is none, or they contradict each other.
    """
    from merak.plan.search.pinned import Pinned

    _check_counts(request)
    _check_folders(request)
    _check_words(request)
    if request.options and request.schedule is None:
        raise CommandError(f"--option {request.options[0]} is of a schedule; name --schedule too.")
    if request.zero not in (None, 0, 1, 2, 3):
        raise CommandError(f"--zero {request.zero} is no stage of ZeRO; use 0, 1, 2 or 3.")
    if request.gradient_sums not in ("float32", "own"):
        raise CommandError(
            f"--gradient-sums {request.gradient_sums} is no type of sums; use float32 or own."
        )
    check_reductions(
        request.gradient_compression, request.hierarchical_reductions, request.tied_gradients
    )
    if request.sub_pipelining not in (None, "on", "off"):
        raise CommandError(f"--sub-pipelining {request.sub_pipelining} is none; use on or off.")
    if request.sub_pipelining == "on" and request.sequence_parallel:
        raise CommandError(
            "--sub-pipelining on hides all-reduces, of which --sequence-parallel leaves none; use "
            "one of the two."
        )
    return Pinned(
        dp=request.dp,
        tp=request.tp,
        pp=request.pp,
        cp=request.cp,
        ep=request.ep,
        microbatch=request.microbatch,
        schedule=request.schedule,
        schedule_options=dict(map(_key_value, request.options or ())),
        recompute=request.recompute,
        offload=None if request.offload == "off" else request.offload,
        zero=request.zero,
        sequence_parallel=request.sequence_parallel,
        sub_pipelining=request.sub_pipelining,
        partition=_sizes(request.partition),
    )


def _check_counts(request: PlanRequest) -> None:
    for flag, value in (
        ("--global-batch", request.global_batch),
        ("--seq", request.sequence),
        ("--top", request.top),
        ("--dp", request.dp),
        ("--tp", request.tp),
        ("--pp", request.pp),
        ("--cp", request.cp),
        ("--ep", request.ep),
        ("--microbatch", request.microbatch),
    ):
        if value is not None and value < 1:
            raise CommandError(f"{flag} {value} is too few; use 1 or more.")
    price = request.price_per_device_hour
    if price is not None and not (0 <= price < math.inf):
        raise CommandError(f"--price-per-device-hour {price} is no price; use 0 or more.")


def _check_words(request: PlanRequest) -> None:
    """Refuse words that no option knows.

    Raises:
        MerakError: one is unknown; the sentence lists those that are known.
    """
    from merak.core.errors import ScheduleError, did_you_mean
    from merak.plan.activations.offload import parse_offload
    from merak.plan.recompute_spec import parse_recompute
    from merak.schedule import registry

    parse_recompute(request.recompute)
    parse_offload(request.offload)
    if request.schedule is None or registry.is_file(request.schedule):
        return
    known = registry.options(request.schedule)
    for name, _ in map(_key_value, request.options or ()):
        if name not in known:
            meant = did_you_mean(name, known)
            fix = f"; it takes {', '.join(known) or 'none'}." if meant == "." else meant
            raise ScheduleError(f"--option {name} is unknown to {request.schedule}{fix}")


def _check_folders(request: PlanRequest) -> None:
    """Refuse a file that cannot be written before minutes of planning, not after them."""
    for flag, file in (("--output", request.output), ("--page", request.page)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{flag} {file}: there is no folder {file.parent}; make it first.")


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"--option {text} is not of the form KEY=VALUE.")
    return key, parse_value(value)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise CommandError(
            f"--partition {text} is no list of whole numbers; use such as 5,7,7,7."
        ) from None

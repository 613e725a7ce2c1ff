"""Report of `merak plan`: the ranking, with what each plan takes, and what was rejected."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from merak.core import units
from merak.core.units import counted, size, table_lines
from merak.plan.memory.non_tensor import NonTensorMemory
from merak.plan.optimizer.home import folder_of, is_away
from merak.plan.price.candidate import Candidate
from merak.plan.search.explain import degrees

if TYPE_CHECKING:
    import torch

    from merak.plan.cluster.cluster import Cluster
    from merak.plan.price.price import Price
    from merak.plan.search.ranking import Ranking

_SECONDS_PER_HOUR = 3600.0
_BILLION = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Candidate):
    """One plan: a candidate, and what it takes.

    Args:
        devices: that it uses.
        offload: `offload_activations` under its former name.
        step_seconds: of a step.
        uncertainty: of it, as a fraction.
        tokens_per_second_per_device: throughput.
        mfu: model FLOPs ÷ the peak of the devices, by their data sheets or as it was measured.
        bubble_fraction: idle time of pp ranks.
        seconds: of a step by cause.
        peak_memory_bytes: of every pp rank.
        memory_uncertainty: of it, as a fraction.
        device_memory_bytes: of every pp rank's device; None where it is not known.
        host_memory_bytes: in the memory of the host that has the least of it left.
        usable_host_memory_bytes: that this host has for it; None where it is not known.
        non_tensor_bytes: of the smallest device, that hold no tensor, by what they are for; None
            where its memory is not known.
        fits: whether every pp rank holds its peak, and every host what is in its memory.
        balanced: whether `partition` is what the job has where none is given.
        dollars_per_step: where a price is known.
        dollars_per_billion_tokens: where a price is known.
    """

    devices: int
    offload: str | None
    step_seconds: float
    uncertainty: float
    tokens_per_second_per_device: float
    mfu: float
    bubble_fraction: float
    seconds: dict[str, float]
    peak_memory_bytes: list[int]
    memory_uncertainty: float
    device_memory_bytes: list[float] | None
    host_memory_bytes: int
    usable_host_memory_bytes: int | None
    non_tensor_bytes: dict[str, int] | None
    fits: bool
    balanced: bool
    dollars_per_step: float | None
    dollars_per_billion_tokens: float | None


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A rejected region of the space.

    Args:
        what: the choices that its candidates share.
        why: the reason.
        candidates: how many there are; 0 where they were never listed.
    """

    what: str
    why: str
    candidates: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The best plan of another kind, in another job, or on other devices.

    Args:
        what: the change.
        plan: the best one; None where none fits.
    """

    what: str
    plan: PlanRow | None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Report of a search.

    Args:
        model: the architecture's class name.
        cluster: the devices, as they were named.
        devices: their number.
        global_batch: samples of a step.
        sequence: tokens of one; None where samples are no sequences of tokens.
        precision: types of parameters and of autocast, and who says so.
        counted: what throughput counts: "tokens", or "samples" where these are no tokens.
        plans: fastest first.
        rejected: regions of the space, with reasons.
        notes: sentences on what tensor parallel degrees leave whole on every rank.
        candidates: size of the space.
        priced: candidates that were priced.
        proved: whether no other candidate can be faster than the first plan.
        kinds: the best plan of each other schedule, and of none, fastest first.
        what_if: the best plans of other jobs.
        commands: to start the first plan, one for each kind of node.
        starts: what the script of the commands must do; None where they start a recipe.
        output: file of the first plan; None where none was asked for.
        page: file of the page; None where none was asked for.
        seconds: that planning took.
    """

    model: str
    cluster: str
    devices: int
    global_batch: int
    sequence: int | None
    precision: str
    counted: str
    plans: list[PlanRow]
    rejected: list[RejectedRow]
    notes: list[str]
    candidates: int
    priced: int
    proved: bool
    kinds: list[WhatIf]
    what_if: list[WhatIf]
    commands: list[str]
    starts: str | None
    output: str | None
    page: str | None
    seconds: float


def row_of(
    price: Price, cluster: Cluster, dtype: torch.dtype, dollars_per_hour: float | None
) -> PlanRow:
    """The row of a plan.

    Args:
        price: of the plan.
        cluster: the devices.
        dtype: element type of the matrix products, for the peak of the devices.
        dollars_per_hour: of all devices.
    """
    own = price.candidate
    whole = sum(nodes.num_devices for nodes in cluster.nodes)
    peak = sum(n.device.peak_rate(dtype) * n.num_devices for n in cluster.nodes) / whole
    dollars = None
    if dollars_per_hour is not None:
        dollars = dollars_per_hour / whole * own.world_size * price.step_s / _SECONDS_PER_HOUR
    known = [most for most in price.device_bytes if most < float("inf")]
    return PlanRow(
        **own.values(),
        devices=own.world_size,
        offload=own.offload_activations,
        step_seconds=price.step_s,
        uncertainty=price.uncertainty,
        tokens_per_second_per_device=price.tokens_per_second_per_device,
        mfu=price.model_flops / price.step_s / (peak * own.world_size),
        bubble_fraction=price.bubble_fraction,
        seconds={
            "compute": price.compute_s,
            "bubble": price.bubble_s,
            "exposed_communication": price.exposed_communication_s,
            "optimizer": price.optimizer_s,
        },
        peak_memory_bytes=list(price.peak_memory_bytes),
        memory_uncertainty=price.memory_uncertainty,
        device_memory_bytes=known if len(known) == len(price.device_bytes) else None,
        host_memory_bytes=price.host.needed_bytes,
        usable_host_memory_bytes=price.host.usable_bytes,
        non_tensor_bytes=_non_tensor_bytes(own, cluster),
        fits=price.fits,
        balanced=price.is_balanced,
        dollars_per_step=dollars,
        dollars_per_billion_tokens=None if dollars is None else dollars / price.tokens * _BILLION,
    )


def _non_tensor_bytes(candidate: Candidate, cluster: Cluster) -> dict[str, int] | None:
    """Bytes of the smallest device that hold no tensor of a job."""
    import torch

    from merak.plan.cluster.fit import non_tensor_on

    smallest = min(cluster.devices, key=lambda device: device.memory_bytes or math.inf)
    found = non_tensor_on(smallest, candidate.mesh(0, torch.device("cpu")))
    return None if found is None else asdict(found)


def rejected_rows(ranking: Ranking) -> list[RejectedRow]:
    """Rows of the rejected regions."""
    return [RejectedRow(own.what, own.why, own.count) for own in ranking.rejected]


def text_of(report: PlanReport, explains: bool = False) -> str:
    """Format a report for people, in at most 80 columns as far as words can be broken.

    Args:
        report: of a search.
        explains: whether to list what was left out, with the reasons.
    """
    lines = [
        *_wrapped(
            f"{report.model} on {report.cluster} ({counted(report.devices, 'device')}), "
            f"{samples(report.global_batch, report.sequence)} a step"
        ),
        *_wrapped(report.precision),
        *_wrapped(
            f"{counted(report.candidates, 'candidate')}, {report.priced} of them priced: "
            f"{_claim(report)}; planned in {report.seconds:.1f} s"
        ),
        "",
        *_aligned(_layouts(report.plans)),
        "",
        *_aligned(_times(report)),
        "",
        *_best(report),
        "",
    ]
    if report.kinds:
        lines += ["the best with other schedules:", *_aligned(_kinds(report)), ""]
    if report.what_if:
        what_ifs = [
            line for own in report.what_if for line in _wrapped(_what_if(own, report.counted), "  ")
        ]
        lines += ["what if:", *what_ifs, ""]
    rejected = [line for own in report.rejected for line in _wrapped(_rejected(own), "  ")]
    notes = [line for own in report.notes for line in _wrapped(f"note: {own}")]
    if explains:
        lines += ["left out:", *rejected, ""] if rejected else []
    elif report.rejected:
        lines += [f"--explain says why {report.candidates - len(report.plans):,} are left out", ""]
    lines += [*notes, ""] if notes else []
    unwritten = "" if report.output else ", once --output plan.json has written it"
    lines += [f"to start it{unwritten}:"]
    lines += [f"  {command}" for command in report.commands]
    lines += [] if report.starts is None else _wrapped(f"({report.starts})", "  ")
    return "\n".join(lines)


def samples(number: int, sequence: int | None) -> str:
    """Samples of a step in words, with their tokens where they are sequences."""
    of = "" if sequence is None else f" of {counted(sequence, 'token')}"
    return f"{counted(number, 'sample')}{of}"


def _claim(report: PlanReport) -> str:
    if report.proved:
        return "no other can be faster than the first"
    return "the others are estimated slower"


_WIDTH = 80
"""Columns that the page takes: those of a terminal that nobody has made wider."""


_WORDS = ("schedule", "recompute", "layout")
"""Headings of columns of words."""


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    return table_lines(rows, [place for place, name in enumerate(rows[0]) if name in _WORDS])


def _layouts(plans: Sequence[PlanRow]) -> list[tuple[str, ...]]:
    """How every plan lays the job out; cp, ep and devices where plans have them or differ."""
    more = [axis for axis in ("cp", "ep") if any(getattr(row, axis) > 1 for row in plans)]
    more += ["devices"] * (len({row.devices for row in plans}) > 1)
    rows: list[tuple[str, ...]] = [
        ("#", "dp", "tp", "pp", *more, "microbatches", "zero", "schedule", "recompute")
    ]
    for number, row in enumerate(plans, start=1):
        options = "".join(f" {key}={value}" for key, value in row.schedule_options.items())
        extras = " +sp" if row.sequence_parallel else " +sub" if row.sub_pipelining == "on" else ""
        recompute = row.recompute or "off"
        recompute = recompute if recompute.isalpha() else "some"
        if row.offload_activations not in (None, "off"):
            recompute += " +offload"
        zero = str(row.zero) + " +" * is_away(row.offload_optimizer)
        if is_away(row.offload_optimizer):
            zero += "cpu" if folder_of(row.offload_optimizer) is None else "files"
        rows.append(
            (
                str(number),
                *map(str, (row.dp, row.tp, row.pp)),
                *(str(getattr(row, axis)) for axis in more),
                f"{row.num_microbatches} of {row.microbatch}",
                zero,
                f"{row.schedule}{options}{extras}",
                recompute,
            )
        )
    return rows


def _times(report: PlanReport) -> list[tuple[str, ...]]:
    """How long a step of every plan takes, by cause, and its memory."""
    rows: list[tuple[str, ...]] = [
        (
            "#",
            *("step", "±", "compute", "bubble", "comm.", "optim."),
            *(f"{report.counted}/s/dev.", "MFU", "memory"),
        )
    ]
    for number, row in enumerate(report.plans, start=1):
        rows.append(
            (
                str(number),
                units.seconds(row.step_seconds),
                f"{row.uncertainty:.0%}",
                *(f"{own / row.step_seconds:.0%}" for own in row.seconds.values()),
                f"{row.tokens_per_second_per_device:,.0f}",
                f"{row.mfu:.1%}",
                size(max(row.peak_memory_bytes)),
            )
        )
    return rows


def _best(report: PlanReport) -> list[str]:
    best = report.plans[0]
    sizes = ", ".join(size(peak) for peak in best.peak_memory_bytes)
    limit = best.device_memory_bytes
    of = "" if limit is None else f", of {size(int(min(limit)))} that tensors may take"
    given = "" if best.balanced else ", to be given as `partition`"
    lines = _wrapped(
        f"the first: memory by pp rank {sizes} (± {best.memory_uncertainty:.0%}){of}; segments of "
        f"its stages {', '.join(map(str, best.partition or ()))}{given}"
    )
    if limit is not None and best.non_tensor_bytes is not None:
        lines += _wrapped(f"  not for tensors: {NonTensorMemory(**best.non_tensor_bytes)}")
    if best.host_memory_bytes:
        usable = best.usable_host_memory_bytes
        of = ", whose size is not known" if usable is None else f" of {size(usable)}"
        lines += _wrapped(f"  in the memory of a host: {size(best.host_memory_bytes)}{of}")
    if best.dollars_per_step is not None and best.dollars_per_billion_tokens is not None:
        lines.append(
            f"  ${best.dollars_per_step:.4g} a step, "
            f"${best.dollars_per_billion_tokens:,.0f} a billion {report.counted}"
        )
    return lines


def _kinds(report: PlanReport) -> list[tuple[str, ...]]:
    """What the best plan of every other schedule takes, beside the first plan."""
    rows: list[tuple[str, ...]] = [("schedule", "step", "more", "layout")]
    for own in report.kinds:
        assert own.plan is not None
        more = own.plan.step_seconds / report.plans[0].step_seconds - 1.0
        step = units.seconds(own.plan.step_seconds)
        rows.append((own.what, step, f"{more:.1%}", degrees(own.plan)))
    return rows


def _what_if(own: WhatIf, unit: str) -> str:
    if own.plan is None:
        return f"{own.what}: no plan fits"
    row = own.plan
    return (
        f"{own.what}: {units.seconds(row.step_seconds)}, {row.tokens_per_second_per_device:,.0f} "
        f"{unit} a second and device, with {degrees(row)}"
    )


def _rejected(own: RejectedRow) -> str:
    count = f" ({counted(own.candidates, 'candidate')})" if own.candidates else ""
    return f"{own.what}{count}: {own.why}"

"""Report of `merak plan`: the ranking, with what each plan takes, and what was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merak.core.units import size

if TYPE_CHECKING:
    import torch

    from merak.plan.cluster.cluster import Cluster
    from merak.plan.price.price import Price
    from merak.plan.search.ranking import Ranking

_SECONDS_PER_HOUR = 3600.0
_BILLION = 1e9


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan, with the names of the command's options.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        ep: expert parallel degree.
        cp: context parallel degree.
        microbatch: samples of one microbatch.
        num_microbatches: of a step of one replica.
        schedule: its name.
        schedule_options: of its builder.
        recompute: what is recomputed.
        zero: ZeRO stage.
        sequence_parallel: whether the sequence is sharded.
        sub_pipelining: "on" or "off".
        offload: what is offloaded.
        partition: segments of every stage.
        step_seconds: of a step.
        uncertainty: of it, as a fraction.
        tokens_per_second_per_device: throughput.
        mfu: model FLOPs ÷ what the devices could do at their peak.
        bubble_fraction: idle time of pp ranks.
        seconds: of a step by cause.
        peak_memory_bytes: of every pp rank.
        memory_uncertainty: of it, as a fraction.
        device_memory_bytes: of every pp rank's device; None where it is not known.
        fits: whether every pp rank holds its peak.
        dollars_per_step: where a price is known.
        dollars_per_billion_tokens: where a price is known.
    """

    dp: int
    tp: int
    pp: int
    ep: int
    cp: int
    microbatch: int
    num_microbatches: int
    schedule: str
    schedule_options: dict[str, Any]
    recompute: str | None
    zero: int
    sequence_parallel: bool
    sub_pipelining: str
    offload: str | None
    partition: list[int] | None
    step_seconds: float
    uncertainty: float
    tokens_per_second_per_device: float
    mfu: float
    bubble_fraction: float
    seconds: dict[str, float]
    peak_memory_bytes: list[int]
    memory_uncertainty: float
    device_memory_bytes: list[float] | None
    fits: bool
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
    """The best plan in another job or on other devices.

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
        sequence: tokens of one.
        plans: fastest first.
        rejected: regions of the space, with reasons.
        candidates: size of the space.
        priced: candidates that were priced.
        proved: whether no other candidate can be faster than the first plan.
        what_if: the best plans of other jobs.
        commands: to start the first plan, one for each kind of node.
        output: file of the first plan; None where none was asked for.
        page: file of the page; None where none was asked for.
        seconds: that planning took.
    """

    model: str
    cluster: str
    devices: int
    global_batch: int
    sequence: int
    plans: list[PlanRow]
    rejected: list[RejectedRow]
    candidates: int
    priced: int
    proved: bool
    what_if: list[WhatIf]
    commands: list[str]
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
    peak = sum(n.device.flop_rate(dtype) * n.num_devices for n in cluster.nodes) / whole
    dollars = None
    if dollars_per_hour is not None:
        dollars = dollars_per_hour / whole * own.world_size * price.step_s / _SECONDS_PER_HOUR
    known = [most for most in price.device_bytes if most < float("inf")]
    return PlanRow(
        dp=own.dp,
        tp=own.tp,
        pp=own.pp,
        ep=1,
        cp=1,
        microbatch=own.microbatch,
        num_microbatches=own.num_microbatches,
        schedule=own.schedule,
        schedule_options=dict(own.schedule_options),
        recompute=own.recompute,
        zero=own.zero,
        sequence_parallel=own.sequence_parallel,
        sub_pipelining=own.sub_pipelining,
        offload=own.offload,
        partition=None if own.partition is None else list(own.partition),
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
        fits=price.fits,
        dollars_per_step=dollars,
        dollars_per_billion_tokens=None if dollars is None else dollars / price.tokens * _BILLION,
    )


def rejected_rows(ranking: Ranking) -> list[RejectedRow]:
    """Rows of the rejected regions."""
    return [RejectedRow(own.what, own.why, own.count) for own in ranking.rejected]


def text_of(report: PlanReport) -> str:
    """Format a report for people."""
    lines = [
        f"{report.model} on {report.cluster} ({report.devices} devices), {report.global_batch} "
        f"samples of {report.sequence} tokens a step",
        f"{report.candidates} candidates, {report.priced} of them priced in "
        f"{report.seconds:.1f} s: {_claim(report)}",
        "",
        *_table(report.plans),
        "",
        *_best(report),
        "",
    ]
    if report.what_if:
        lines += ["what if:", *map(_what_if, report.what_if), ""]
    lines += ["left out:", *map(_rejected, report.rejected), "", "to start it:"]
    lines += [f"  {command}" for command in report.commands]
    return "\n".join(lines)


def _claim(report: PlanReport) -> str:
    if report.proved:
        return "no other can be faster than the first"
    return "the others are estimated slower"


def _table(plans: Sequence[PlanRow]) -> list[str]:
    head = (
        f"{'dp':>6} {'tp':>4} {'pp':>4} {'micro':>9}  {'schedule':<24} {'zero':>4} "
        f"{'recompute':<10} {'step':>10} {'± %':>4} {'compute':>8} {'bubble':>7} {'commun.':>8} "
        f"{'optim.':>7} {'tokens/s/dev':>12} {'MFU':>6} {'memory':>9}"
    )
    return [head, *map(_line, plans)]


def _line(row: PlanRow) -> str:
    options = "".join(f" {key}={value}" for key, value in row.schedule_options.items())
    extras = " +sp" if row.sequence_parallel else " +sub" if row.sub_pipelining == "on" else ""
    schedule = f"{row.schedule}{options}{extras}"
    shares = [row.seconds[name] / row.step_seconds for name in row.seconds]
    micro = f"{row.num_microbatches}×{row.microbatch}"
    recompute = row.recompute or "off"
    return (
        f"{row.dp:>6} {row.tp:>4} {row.pp:>4} {micro:>9}  {schedule:<24} {row.zero:>4} "
        f"{recompute if len(recompute) <= 10 else 'some':<10} {row.step_seconds:>8.4g} s "
        f"{row.uncertainty:>4.0%} {shares[0]:>8.0%} {shares[1]:>7.0%} {shares[2]:>8.0%} "
        f"{shares[3]:>7.0%} {row.tokens_per_second_per_device:>12,.0f} {row.mfu:>6.1%} "
        f"{size(max(row.peak_memory_bytes)):>9}"
    )


def _best(report: PlanReport) -> list[str]:
    best = report.plans[0]
    sizes = " ".join(size(peak) for peak in best.peak_memory_bytes)
    limit = best.device_memory_bytes
    of = "" if limit is None else f" of {size(int(min(limit)))}"
    lines = [f"the first: memory by pp rank {sizes}{of}, ± {best.memory_uncertainty:.0%}"]
    if best.dollars_per_step is not None and best.dollars_per_billion_tokens is not None:
        lines.append(
            f"           ${best.dollars_per_step:.4g} a step, "
            f"${best.dollars_per_billion_tokens:,.0f} a billion tokens"
        )
    return lines


def _what_if(own: WhatIf) -> str:
    if own.plan is None:
        return f"  {own.what}: no plan fits"
    row = own.plan
    return (
        f"  {own.what}: {row.step_seconds:.4g} s, {row.tokens_per_second_per_device:,.0f} "
        f"tokens/s a device, with dp={row.dp} tp={row.tp} pp={row.pp}"
    )


def _rejected(own: RejectedRow) -> str:
    count = f" ({own.candidates:,} candidates)" if own.candidates else ""
    return f"  {own.what}{count}: {own.why}"

"""Table and figures of Merak's paper, beside our prices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.fit import non_tensor_on
from merak.plan.memory.ledger import Category
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from tools.paper_jobs import (
    GPTS,
    MEBIBYTE,
    cluster,
    compared,
    equal_layers,
    fitting,
    gpt,
    is_near,
    layout,
    read,
)


def table_3() -> Iterator[dict[str, Any]]:
    """Memory and speed of GPT-2.5B on 8 GPUs, without and with stage-aware recomputation."""
    printed = {
        (int(row["pp"]), int(row["microbatch"]), row["what"], row["unit"]): row["low"]
        for row in read("merak_tpds.csv")
        if row["figure"] == "table III"
    }
    for pp, microbatch in [key[:2] for key in printed if key[2:] == ("default", "MB")]:
        default = table_3_price(pp, microbatch, None)
        row: dict[str, Any] = {"stages": pp, "microbatch": microbatch}
        memory = printed[pp, microbatch, "default", "MB"]
        peak = max(default.peak_memory_bytes) / MEBIBYTE
        row["paper, MB"] = f"{float(memory):,.0f}" if memory else "out of memory"
        row["Merak, MiB"] = f"{peak:,.0f}"
        row["ratio"] = round(peak / float(memory), 2) if memory else ""
        for way, own in (("default", default), ("stage-aware", None)):
            speed = printed.get((pp, microbatch, way, "samples/s"), "")
            own = own or (table_3_price(pp, microbatch, "auto") if speed else default)
            ours, fits = 128 / own.step_s, "" if own.fits else ", does not fit"
            row[f"paper, {way}, samples/s"] = speed
            row[f"Merak, {way}"] = f"{ours:.2f}{fits}" if speed else ""
            row[f"{way}, ratio"] = round(ours / float(speed), 2) if speed else ""
        yield row


@cache
def table_3_price(pp: int, microbatch: int, recompute: str | None) -> Price:
    """A row of table III, by the shifted critical path."""
    candidate = replace(_table_3_job(pp, microbatch), recompute=recompute)
    return price(gpt(*GPTS["GPT-2.5B"]), _USUAL, candidate)


def _table_3_job(pp: int, microbatch: int) -> Candidate:
    """Of a row of table III: pp stages, 8 GPUs and a batch of 128."""
    return Candidate(
        dp=8 // pp, pp=pp, microbatch=microbatch, num_microbatches=128 * pp // 8 // microbatch,
        schedule="shifted_critical_path", recompute=None,
    )  # fmt: skip


def table_3_parts() -> Iterator[dict[str, Any]]:
    """MiB of what stages of table III's row of 4 stages and microbatches of 2 hold.

    All stages of our cut; of the other ways, the fullest.
    """
    workload, job = gpt(*GPTS["GPT-2.5B"]), _table_3_job(4, 2)
    ways = {
        "by time": job,
        "13, 14, 14, 13 layers": replace(job, partition=(27, 28, 28, 27)),
        "13, 15, 15, 11 layers": replace(job, partition=(27, 30, 30, 23)),
        "by time, layers recomputed one by one": replace(job, schedule="1f1b", recompute="full"),
    }
    for name, own in ways.items():
        rate = 128 / price(workload, _USUAL, own).step_s
        stages = memory_of(workload, _USUAL, own)
        fullest = max(stages, key=lambda memory: memory.peak.total_bytes)
        for stage, memory in enumerate(stages):
            if own is not job and memory is not fullest:
                continue
            held = {kind: memory.peak.by_category.get(kind, 0) / MEBIBYTE for kind in Category}
            rest = sum(held.values()) - sum(held[kind] for kind in _SHOWN)
            row: dict[str, Any] = {"cut": name, "samples/s": f"{rate:.2f}", "stage": stage}
            row |= {kind.value: f"{held[kind]:,.0f}" for kind in _SHOWN}
            yield row | {"others": f"{rest:,.0f}", "in all": f"{sum(held.values()):,.0f}"}


def table_3_beside() -> list[dict[str, Any]]:
    """MiB of an RTX 3090 that the forecast keeps from the tensors of that row."""
    device = _USUAL.nodes[0].device
    found = non_tensor_on(device, _table_3_job(4, 2).mesh(0, torch.device("cpu")))
    assert found is not None and device.memory_bytes is not None
    parts = {
        "context": found.context,
        f"{found.num_communicators} communicators": found.communicators,
        "workspaces": found.workspaces,
        "gaps of the allocator": found.gaps,
        "in all": found.total,
        "left for tensors": device.memory_bytes - found.total,
    }
    return [{name: f"{own / MEBIBYTE:,.0f}" for name, own in parts.items()}]


_SHOWN = (
    Category.PARAMETERS, Category.OPTIMIZER, Category.GRADIENTS, Category.ACTIVATIONS,
    Category.COMMUNICATION,
)  # fmt: skip


FULL_RATE = "merak_cluster_full_rate.yaml"
PCIE = {"merak_cluster.yaml": "PCIe through the host", FULL_RATE: "PCIe at full rate"}
"""Clusters of Merak's paper, by how a node's GPUs send to each other."""

_USUAL = cluster("merak_cluster.yaml")


def figure_9a() -> Iterator[dict[str, Any]]:
    """Two layers of hidden size 3072 a GPU, twice as many microbatches as stages."""
    for pp in (4, 8, 16):
        workload = gpt(2 * pp, 3072, 24)
        for microbatch in (1, 4):  # not printed
            one, other = (
                price(
                    workload,
                    _USUAL,
                    Candidate(
                        pp=pp, microbatch=microbatch, num_microbatches=2 * pp, schedule=schedule,
                        recompute=recompute, partition=equal_layers(workload, pp),
                    ),
                ).step_s
                for schedule, recompute in (("1f1b", "full"), ("shifted_critical_path", None))
            )  # fmt: skip
            yield {
                "stages": pp,
                "microbatch": microbatch,
                "1F1B, s": round(one, 2),
                "shifted critical path, s": round(other, 2),
                "paper: less time, %": "18.6 to 22.0",
                "Merak: less time, %": round(100 * (1 - other / one), 1),
            }


def figure_9b() -> Iterator[dict[str, Any]]:
    """8 stages, a batch of 128: what saving as much as fits gains over full recomputation."""
    for microbatch in (1, 2, 4):  # not printed; 1 is the fastest of table III
        base = table_3_price(8, microbatch, None)
        filled = table_3_price(8, microbatch, "auto")
        yield {
            "microbatch": microbatch,
            "paper: gain": 1.21,
            "Merak: gain": round(base.step_s / filled.step_s, 3),
        }


def figure_9c() -> Iterator[dict[str, Any]]:
    """24 layers, tp over all GPUs, hidden size in proportion: sub-pipelining on and off."""
    for tp, hidden in ((8, 1024), (16, 2048), (32, 4096), (64, 8192)):
        workload = gpt(24, hidden, 64)  # heads not printed
        row: dict[str, Any] = {"tp": tp, "hidden": hidden, "paper: speedup": "1.46 to 1.57"}
        for name, which in PCIE.items():
            off, on = (
                price(
                    workload,
                    cluster(name),
                    # Microbatches are not printed, except that they have at least two samples.
                    Candidate(tp=tp, microbatch=4, num_microbatches=4, sub_pipelining=way),
                )
                for way in ("off", "on")
            )
            row[f"communication, {which}"] = f"{off.exposed_communication_s / off.step_s:.0%}"
            row[f"Merak: speedup, {which}"] = round(off.step_s / on.step_s, 2)
        yield row


Changes = dict[str, Any]
"""Fields of a candidate that are others."""

BATCH = 512
CASES = (
    *((model, devices, (1,)) for model in ("GPT-1.4B", "GPT-2.5B") for devices in (16, 32, 64)),
    *(("GPT-8.3B", devices, (2, 4)) for devices in (16, 32, 64)),
    *(("GPT-20B", devices, (4, 8)) for devices in (32, 64)),
)
"""Figure 6: models, GPUs, and tensor parallel degrees, 1 for the two small models by the text; it
names ranges over batches of 64 to 512. These are all that ran: GPT-20B did not on 16 GPUs."""

ZEROS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero": 1},
    "ZeRO 2": {"zero": 2},
    "ZeRO 3": {"zero": 3},
    "ZeRO 3, optimizer in host memory": {"zero": 3, "offload_optimizer": "cpu"},
}
"""The last has what ZeRO-Infinity has of the optimizer; there, parameters leave as well."""


def figure_6() -> Iterator[dict[str, Any]]:
    """How many times as long as Merak's best plan the best plan of each baseline takes.

    1F1B recomputes all, as Megatron-LM has it; "saving what fits" adds Merak's own way to it.
    """
    printed = [row for row in read("merak_tpds.csv") if row["figure"] == "figure 6"]
    for case in CASES:
        model, devices, _ = case
        own = [row for row in printed if row["model"] == model]
        paper = next((row for row in own if row["devices"] == str(devices)), own[0])
        row: dict[str, Any] = {"model": model, "GPUs": devices}
        row["paper: over the best"] = f"{paper['low']} to {paper['high']}"
        best = fastest(_layouts(case, True), gpt(*GPTS[model]), _USUAL)
        others = _baselines(case)
        if best is None:
            names = ("the best", *others, "1F1B, if PCIe were used once")
            yield row | {name: "" for name in names} | {"Merak's plan": "does not fit"}
            continue
        over = {name: own.step_s / best.step_s for name, own in others.items() if own}
        row["the best"] = round(min(over[name] for name in over if name != SAVING), 2)
        row |= {name: round(over[name], 2) if name in over else "does not fit" for name in others}
        row["1F1B, if PCIe were used once"] = _over_1f1b(case, cluster(FULL_RATE))
        yield row | {"Merak's plan": layout(best)}


SAVING = "1F1B, saving what fits"


def _baselines(case: tuple[str, int, tuple[int, ...]]) -> dict[str, Price | None]:
    """The fastest plan of each baseline of figure 6; None where none fits."""
    model, devices, _ = case
    workload = gpt(*GPTS[model])
    pipelined = fitting(workload, _USUAL, _layouts(case, False))
    saving = [replace(own.candidate, recompute="auto") for own in pipelined[:3]]
    found = {"1F1B": pipelined, SAVING: fitting(workload, _USUAL, saving)}
    layouts = [own for own in _zero_layouts(devices) if own.zero == 1]
    for name, options in ZEROS.items():
        found[name] = fitting(workload, _USUAL, [replace(own, **options) for own in layouts])
    return {name: priced[0] if priced else None for name, priced in found.items()}


def _over_1f1b(case: tuple[str, int, tuple[int, ...]], devices: Cluster) -> float | str:
    """Time of the fastest plan of 1F1B ÷ that of Merak's."""
    workload = gpt(*GPTS[case[0]])
    baseline, best = (fastest(_layouts(case, own), workload, devices) for own in (False, True))
    return round(baseline.step_s / best.step_s, 2) if baseline and best else "does not fit"


def _layouts(case: tuple[str, int, tuple[int, ...]], merak: bool) -> list[Candidate]:
    """Layouts to search: powers of two whose stages divide the layers about equally."""
    model, devices, degrees = case
    found = []
    layers = GPTS[model][0]
    for tp in degrees:
        for pp in (4, 8, 16):
            dp = devices // (tp * pp)
            for microbatch in (1, 2, 4):
                count, rest = divmod(BATCH, dp * microbatch) if dp else (0, 1)
                split = merak and tp > 1
                if rest or count < pp or pp > layers // 2 or (split and microbatch < 2):
                    continue
                found.append(
                    Candidate(
                        dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=count,
                        schedule="shifted_critical_path" if merak else "1f1b",
                        recompute=None if merak else "full",
                        sub_pipelining="on" if split else "off",
                    )
                )  # fmt: skip
    return found


def _zero_layouts(devices: int) -> list[Candidate]:
    """ZeRO 1 to 3 over all devices, with full recomputation and without."""
    return [
        Candidate(
            dp=devices, microbatch=microbatch, num_microbatches=BATCH // devices // microbatch,
            zero=zero, recompute=recompute,
        )
        for zero in (1, 2, 3)
        for recompute in ("full", "off")
        for microbatch in (1, 2, 4, 8)
        if BATCH % (devices * microbatch) == 0
    ]  # fmt: skip


OVER_ZERO = (CASES[2], CASES[4], CASES[8], CASES[10])


def over_zero() -> Iterator[dict[str, Any]]:
    """Merak's best plan of figure 6 over the best of ZeRO, by what is assumed of ZeRO.

    The paper has ZeRO behind the other baselines of these cases, of which it is at least as slow:
    Merak's gain over it was at least the one printed over the best baseline.
    """
    printed = [row for row in read("merak_tpds.csv") if row["figure"] == "figure 6"]
    for case in OVER_ZERO:
        model, devices, _ = case
        paper = min(float(row["low"]) for row in printed if row["model"] == model)
        workload = gpt(*GPTS[model])
        hidden = workload.kernels
        best = fastest(_layouts(case, True), workload, _USUAL)
        row: dict[str, Any] = {"model": model, "paper: at least": paper}
        if best is None:
            continue
        for name, (hides, each, most) in ZERO_SUPPOSED.items():
            workload.kernels = replace(hidden, hides_reductions=hides)
            layouts = [c for c in _zero_layouts(devices) if c.microbatch <= most]
            own = _zero_seconds(workload, layouts, each)
            row[name] = round(own / best.step_s, 2) if own else "does not fit"
        workload.kernels = hidden
        yield row


ZERO_SUPPOSED = {
    "as Merak's": (True, False, 8),
    "reductions after the backward": (False, False, 8),
    "the same, microbatches of 2 at most": (False, False, 2),
    "a reduction after each microbatch": (True, True, 8),
    "both": (False, True, 8),
}
"""Assumptions of ZeRO: whether reductions run beside the backward; whether each microbatch has
one, as in DeepSpeed's stages 2 and 3, or the sums of a step; and samples of a microbatch, which the
text calls small."""


def _zero_seconds(workload: Workload, layouts: Sequence[Candidate], each: bool) -> float:
    """Seconds of ZeRO's fastest step; with `each`, of as many steps of one microbatch."""
    if not each:
        priced = fitting(workload, _USUAL, layouts)
        return priced[0].step_s if priced else 0.0
    found = []
    for candidate in layouts:
        own = replace(candidate, num_microbatches=1)
        for one in fitting(workload, _USUAL, [own]):
            updates = candidate.num_microbatches - 1
            found.append(candidate.num_microbatches * one.step_s - updates * one.optimizer_s)
    return min(found, default=0.0)


def fastest(layouts: Sequence[Candidate], workload: Workload, devices: Cluster) -> Price | None:
    """The fastest that fits. Of Merak's layouts, the three fastest are also filled with "auto"."""
    priced = fitting(workload, devices, layouts)
    if not priced:
        return None
    if layouts[0].schedule == "shifted_critical_path":
        some = [own.candidate for own in priced[:3]]
        changed = [replace(candidate, recompute="auto", partition=None) for candidate in some]
        priced += fitting(workload, devices, changed)
    return min(priced, key=lambda own: own.step_s)


def communication() -> Iterator[dict[str, Any]]:
    """Section 1 of the first version: the share of collectives of GPT-1.4B, tp over one node."""
    workload = gpt(*GPTS["GPT-1.4B"])
    for microbatch in (1, 2, 4, 8):  # not printed
        own = Candidate(
            tp=4, microbatch=microbatch, num_microbatches=32 // microbatch, recompute="full"
        )
        shares = {}
        for name in PCIE:
            found = price(workload, cluster(name), own)
            shares[name] = found.exposed_communication_s / found.step_s
        usual, full_rate = shares.values()
        line = compared(0.525, {"": usual, PCIE[FULL_RATE]: full_rate})
        yield {"microbatch": microbatch, **line}


def figure_7() -> list[dict[str, Any]]:
    """What GPT-20B loses where GPUs and batch are doubled, 32 to 64: the text's number.

    The other link is not tried where the usual one is near.
    """
    speeds: dict[str, float] = {}
    words = []
    for name, which in PCIE.items():
        took = []
        for dp, pp, batch in ((1, 8, 256), (2, 8, 512), (1, 16, 512)):
            own = Candidate(
                dp=dp, tp=4, pp=pp, microbatch=2, num_microbatches=batch // dp // 2,
                schedule="shifted_critical_path", sub_pipelining="on", recompute=None,
            )  # fmt: skip
            took.append(price(gpt(*GPTS["GPT-20B"]), cluster(name), own))
        small, large = took[0], min(took[1:], key=lambda one: one.step_s)
        speeds["" if not speeds else which] = small.step_s / large.step_s
        words.append(f"{layout(small)} and {layout(large)}")
        if is_near(speeds[""], _WEAK):
            break
    return [{"layouts": words[0], "fits": small.fits, **compared(_WEAK, speeds)}]


_WEAK = 1 - 0.033


ABLATED = (
    ("GPT-1.4B", 16, 1, 4, 2),
    ("GPT-2.5B", 8, 1, 8, 2),
    ("GPT-8.3B", 4, 2, 8, 2),
    ("GPT-20B", 1, 4, 16, 2),
)
"""Figure 8: models with dp, tp, pp and microbatch on 64 GPUs, as our prices of figure 6 have them;
the paper prints none."""


def _techniques(sizes: tuple[int, int, int, int], batch: int) -> tuple[Candidate, Changes, Changes]:
    """1F1B with full recomputation, and what Merak's techniques change of it.

    The second are stage-aware recomputation and, where there is tp, sub-pipelining; the last is the
    shifted critical path.
    """
    dp, tp, pp, microbatch = sizes
    base = Candidate(
        dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=batch // dp // microbatch,
        schedule="1f1b", recompute="full",
    )  # fmt: skip
    others = {"recompute": "auto", "sub_pipelining": "on" if tp > 1 else "off"}
    return base, others, {"schedule": "shifted_critical_path"}


def figure_8() -> Iterator[dict[str, Any]]:
    """Speed ÷ that of 1F1B with full recomputation, with and without each of the three techniques.

    A batch of 512 and the same layout for all, as the text says; its numbers are a picture.
    """
    for model, *sizes in ABLATED:
        dp, tp, pp, microbatch = sizes
        base, others, path = _techniques((dp, tp, pp, microbatch), BATCH)
        ways = {
            "all": {**others, **path},
            "without shifted critical path": others,
            "without stage-aware recomputation": {**others, **path, "recompute": None},
            "without sub-pipelining": {**others, **path, "sub_pipelining": "off"},
        }
        workload = gpt(*GPTS[model])
        usual = price(workload, _USUAL, base).step_s
        row: dict[str, Any] = {"model": model, "layout": f"{dp}×{tp}×{pp}, microbatch {microbatch}"}
        for name, changes in ways.items():
            own = price(workload, _USUAL, replace(base, **changes))
            row[name] = round(usual / own.step_s, 3)
        yield row


def shifted_path() -> Iterator[dict[str, Any]]:
    """What the shifted critical path adds to the other techniques, by links and length.

    The layouts are those of figure 8, of the models without tensor parallelism; a price of the
    others with "auto" takes minutes.
    """
    for (model, *sizes), batch in itertools.product(ABLATED[:2], (128, 256, 512)):
        dp, tp, pp, microbatch = sizes
        base, others, path = _techniques((dp, tp, pp, microbatch), batch)
        row: dict[str, Any] = {
            "model": model,
            "stages": pp,
            "batch": batch,
            "microbatches a stage": base.num_microbatches // pp,
        }
        for name, which in PCIE.items():
            without, own = (
                price(gpt(*GPTS[model]), cluster(name), replace(base, **changes)).step_s
                for changes in (others, {**others, **path})
            )
            row[f"more speed, {which}"] = f"{without / own - 1:.1%}"
        yield row


FIGURES: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]]]] = {
    "table3": ("Merak, table III", table_3),
    "table3-parts": ("Merak, table III: 4 stages, microbatches of 2, by stage", table_3_parts),
    "table3-beside": ("Merak, table III: memory of a device beside tensors", table_3_beside),
    "communication": ("Merak, section 1: the share of collectives", communication),
    "7": ("Merak, figure 7: weak scaling of GPT-20B", figure_7),
    "8": ("Merak, figure 8: what each technique gains", figure_8),
    "8-path": ("Merak, figure 8: what the shifted critical path adds", shifted_path),
    "9a": ("Merak, figure 9a: shifted critical path", figure_9a),
    "9b": ("Merak, figure 9b: stage-aware recomputation", figure_9b),
    "9c": ("Merak, figure 9c: sub-pipelining", figure_9c),
    "6": ("Merak, figure 6: best plan ÷ best baseline", figure_6),
    "over-zero": ("Merak, figure 6: best plan ÷ ZeRO, by what is assumed", over_zero),
}

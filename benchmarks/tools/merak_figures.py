"""Table and figures of Merak's paper, beside our prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from merak.plan.cluster.cluster import Cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from tools.paper_jobs import (
    GPTS,
    MEBIBYTE,
    cluster,
    compared,
    equal_layers,
    fitting,
    gpt,
    layout,
    read,
)


def table_3() -> list[dict[str, Any]]:
    """Memory and speed of GPT-2.5B on 8 GPUs, without and with stage-aware recomputation."""
    found: dict[tuple[int, int, str], Price] = {}
    rows = []
    for row in read("merak_tpds.csv"):
        if row["figure"] != "table III":
            continue
        sizes = int(row["pp"]), int(row["microbatch"])
        key = (*sizes, row["what"])
        if key not in found:
            recompute = "auto" if row["what"] == "stage-aware" else None
            found[key] = table_3_price(*sizes, recompute)
        own = found[key]
        in_memory = row["unit"] == "MB"
        ours = max(own.peak_memory_bytes) / MEBIBYTE if in_memory else 128 / own.step_s
        inside = max(table_3_price(*sizes, "full", "1f1b").peak_memory_bytes) / MEBIBYTE
        rows.append(
            {
                "stages": row["pp"],
                "microbatch": row["microbatch"],
                "recomputation": row["what"],
                "unit": "MiB" if in_memory else row["unit"],
                "paper": float(row["low"]) if row["low"] else "out of memory",
                "Merak": round(ours, 0 if in_memory else 2),
                "÷ paper": round(ours / float(row["low"]), 3) if row["low"] else "",
                "fits": own.fits,
                "if layers recompute one by one": round(inside) if in_memory else "",
            }
        )
    return rows


def table_3_price(
    pp: int, microbatch: int, recompute: str | None, schedule: str = "shifted_critical_path"
) -> Price:
    """A row of table III: pp stages, 8 GPUs and a batch of 128."""
    candidate = Candidate(
        dp=8 // pp, pp=pp, microbatch=microbatch, num_microbatches=128 * pp // 8 // microbatch,
        schedule=schedule, recompute=recompute,
    )  # fmt: skip
    return price(gpt(*GPTS["GPT-2.5B"], 128), cluster("merak_cluster.yaml"), candidate)


PCIE = {
    "merak_cluster.yaml": "PCIe through the host",
    "merak_cluster_full_rate.yaml": "PCIe at full rate",
}
"""Clusters of Merak's paper, by how a node's GPUs send to each other."""


def figure_9a() -> list[dict[str, Any]]:
    """Two layers of hidden size 3072 a GPU, twice as many microbatches as stages."""
    rows = []
    for pp in (4, 8, 16):
        workload = gpt(2 * pp, 3072, 24, 2 * pp)
        for microbatch in (1, 4):  # not printed
            one, other = (
                price(
                    workload,
                    cluster("merak_cluster.yaml"),
                    Candidate(
                        pp=pp, microbatch=microbatch, num_microbatches=2 * pp, schedule=schedule,
                        recompute=recompute, partition=equal_layers(workload, pp),
                    ),
                ).step_s
                for schedule, recompute in (("1f1b", "full"), ("shifted_critical_path", None))
            )  # fmt: skip
            rows.append(
                {
                    "stages": pp,
                    "microbatch": microbatch,
                    "1F1B, s": round(one, 2),
                    "shifted critical path, s": round(other, 2),
                    "paper: less time, %": "18.6 to 22.0",
                    "Merak: less time, %": round(100 * (1 - other / one), 1),
                }
            )
    return rows


def figure_9b() -> list[dict[str, Any]]:
    """8 stages, a batch of 128: what saving as much as fits gains over full recomputation."""
    rows = []
    for microbatch in (1, 2, 4):  # not printed; 1 is the fastest of table III
        base = table_3_price(8, microbatch, None)
        filled = table_3_price(8, microbatch, "auto")
        rows.append(
            {
                "microbatch": microbatch,
                "paper: gain": 1.21,
                "Merak: gain": round(base.step_s / filled.step_s, 3),
            }
        )
    return rows


def figure_9c() -> list[dict[str, Any]]:
    """24 layers, tp over all GPUs, hidden size in proportion: sub-pipelining on and off."""
    rows = []
    for tp, hidden in ((8, 1024), (16, 2048), (32, 4096), (64, 8192)):
        workload = gpt(24, hidden, 64, 16)  # heads not printed
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
        rows.append(row)
    return rows


CASES = (
    ("GPT-1.4B", 64, 512, (1,)),
    ("GPT-2.5B", 32, 512, (1,)),
    ("GPT-8.3B", 64, 512, (2, 4)),
    ("GPT-20B", 64, 512, (4, 8)),
)
"""Figure 6: models, GPUs, batches and tensor parallel degrees, 1 for the two small models by
the text. It names ranges over batches of 64 to 512 and 16 to 64 GPUs."""


def figure_6() -> list[dict[str, Any]]:
    """Merak's best plan against the best of 1F1B with full recomputation, as Megatron-LM has it."""
    printed = [row for row in read("merak_tpds.csv") if row["figure"] == "figure 6"]
    rows = []
    for model, devices, batch, degrees in CASES:
        own = [row for row in printed if row["model"] == model]
        paper = next((row for row in own if row["devices"] == str(devices)), own[0])
        row: dict[str, Any] = {"model": model, "GPUs": devices, "batch": batch}
        row["paper: speedup"] = f"{paper['low']} to {paper['high']}"
        workload = gpt(*GPTS[model], batch)
        for name in PCIE:
            baseline, best = (
                fastest(_layouts((model, devices, batch, degrees), merak), workload, cluster(name))
                for merak in (False, True)
            )
            if baseline is None or best is None:
                row[f"Merak: speedup, {PCIE[name]}"] = "does not fit"
                continue
            row[f"Merak: speedup, {PCIE[name]}"] = round(baseline.step_s / best.step_s, 2)
            zeros = fitting(workload, cluster(name), _zero_layouts(devices, batch))
            over = round(zeros[0].step_s / best.step_s, 2) if zeros else "does not fit"
            row[f"over ZeRO, {PCIE[name]}"] = over
            row[f"s, {PCIE[name]}"] = f"{baseline.step_s:.1f} and {best.step_s:.1f}"
            row.setdefault("baseline", layout(baseline))
            row.setdefault("Merak's plan", layout(best))
        rows.append(row)
    return rows


def _layouts(case: tuple[str, int, int, tuple[int, ...]], merak: bool) -> list[Candidate]:
    """Layouts to search: powers of two whose stages divide the layers about equally."""
    model, devices, batch, degrees = case
    found = []
    layers = GPTS[model][0]
    for tp in degrees:
        for pp in (4, 8, 16):
            dp = devices // (tp * pp)
            for microbatch in (1, 2, 4):
                count, rest = divmod(batch, dp * microbatch) if dp else (0, 1)
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


def _zero_layouts(devices: int, batch: int) -> list[Candidate]:
    """ZeRO 1 to 3 over all devices, with full recomputation and without."""
    return [
        Candidate(
            dp=devices, microbatch=microbatch, num_microbatches=batch // devices // microbatch,
            zero=zero, recompute=recompute,
        )
        for zero in (1, 2, 3)
        for recompute in ("full", "off")
        for microbatch in (1, 2, 4, 8)
        if batch % (devices * microbatch) == 0
    ]  # fmt: skip


def over_zero() -> list[dict[str, Any]]:
    """Merak's best plan of figure 6 over the best of ZeRO, by what is assumed of ZeRO.

    The paper has ZeRO behind the other baselines of these cases, of which it is at least as slow:
    Merak's gain over it was at least the one printed over the best baseline.
    """
    printed = [row for row in read("merak_tpds.csv") if row["figure"] == "figure 6"]
    rows = []
    for model, devices, batch, degrees in CASES:
        paper = min(float(row["low"]) for row in printed if row["model"] == model)
        workload = gpt(*GPTS[model], batch)
        hidden = workload.kernels
        best = fastest(_layouts((model, devices, batch, degrees), True), workload, _USUAL)
        row: dict[str, Any] = {"model": model, "paper: at least": paper}
        if best is None:
            continue
        for name, (hides, each, most) in ZERO_SUPPOSED.items():
            workload.kernels = replace(hidden, hides_reductions=hides)
            layouts = [c for c in _zero_layouts(devices, batch) if c.microbatch <= most]
            own = _zero_seconds(workload, layouts, each)
            row[name] = round(own / best.step_s, 2) if own else "does not fit"
        workload.kernels = hidden
        rows.append(row)
    return rows


_USUAL = cluster("merak_cluster.yaml")
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
        # "auto" is not offered together with sub-pipelining and needs the time of a search.
        some = [own.candidate for own in priced[:3] if own.candidate.sub_pipelining == "off"]
        changed = [replace(candidate, recompute="auto", partition=None) for candidate in some]
        priced += fitting(workload, devices, changed)
    return min(priced, key=lambda own: own.step_s)


def communication() -> list[dict[str, Any]]:
    """Section 1 of the first version: the share of collectives of GPT-1.4B, tp over one node."""
    workload = gpt(*GPTS["GPT-1.4B"], 32)
    rows = []
    for microbatch in (1, 2, 4, 8):  # not printed
        own = Candidate(
            tp=4, microbatch=microbatch, num_microbatches=32 // microbatch, recompute="full"
        )
        shares = {}
        for name in PCIE:
            found = price(workload, cluster(name), own)
            shares[name] = found.exposed_communication_s / found.step_s
        usual, full_rate = shares.values()
        line = compared(0.525, {"": usual, PCIE["merak_cluster_full_rate.yaml"]: full_rate})
        rows.append({"microbatch": microbatch, **line})
    return rows


def figure_7() -> list[dict[str, Any]]:
    """What GPT-20B loses where GPUs and batch are doubled, 32 to 64: the text's number.

    On 32 GPUs no layout fits by our forecast; the one that lacks the least is taken.
    """
    speeds: dict[str, float] = {}
    words = []
    for name, which in PCIE.items():
        took = []
        for dp, pp, batch in ((1, 8, 256), (2, 8, 512), (1, 16, 512)):
            own = Candidate(
                dp=dp, tp=4, pp=pp, microbatch=2, num_microbatches=batch // dp // 2,
                schedule="shifted_critical_path", sub_pipelining="on",
            )  # fmt: skip
            took.append(price(gpt(*GPTS["GPT-20B"], batch), cluster(name), own))
        small, large = took[0], min(took[1:], key=lambda one: one.step_s)
        speeds["" if not speeds else which] = small.step_s / large.step_s
        words.append(f"{layout(small)} and {layout(large)}")
    return [{"layouts": words[0], "fits": small.fits, **compared(1 - 0.033, speeds)}]


ABLATED = (
    ("GPT-1.4B", 16, 1, 4, 2),
    ("GPT-2.5B", 8, 1, 8, 2),
    ("GPT-8.3B", 4, 2, 8, 2),
    ("GPT-20B", 1, 4, 16, 2),
)
"""Figure 8: models with dp, tp, pp and microbatch on 64 GPUs, as our prices of figure 6 have them;
the paper prints none."""


def figure_8() -> list[dict[str, Any]]:
    """Speed ÷ that of 1F1B with full recomputation, with and without each of the three techniques.

    A batch of 512 and the same layout for all, as the text says; its numbers are a picture.
    """
    rows = []
    for model, dp, tp, pp, microbatch in ABLATED:
        workload = gpt(*GPTS[model], 512)
        base = Candidate(
            dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=512 // dp // microbatch,
            schedule="1f1b", recompute="full",
        )  # fmt: skip
        split = {"sub_pipelining": "on"} if tp > 1 else {}
        # "auto" is not offered together with sub-pipelining.
        saves = {} if tp > 1 else {"recompute": "auto"}
        path = {"schedule": "shifted_critical_path"} | ({} if saves else {"recompute": None})
        ways = {
            "all": {**path, **split, **saves},
            "without shifted critical path": {**split, **saves},
            "without stage-aware recomputation": {**path, **split} | {"recompute": None},
            "without sub-pipelining": {**path, **saves},
        }
        usual = price(workload, cluster("merak_cluster.yaml"), base).step_s
        row: dict[str, Any] = {"model": model, "layout": f"{dp}×{tp}×{pp}, microbatch {microbatch}"}
        for name, changes in ways.items():
            own = price(workload, cluster("merak_cluster.yaml"), replace(base, **changes))
            row[name] = round(usual / own.step_s, 3)
        rows.append(row)
    return rows


FIGURES: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "table3": ("Merak, table III", table_3),
    "communication": ("Merak, section 1: the share of collectives", communication),
    "7": ("Merak, figure 7: weak scaling of GPT-20B", figure_7),
    "8": ("Merak, figure 8: what each technique gains", figure_8),
    "9a": ("Merak, figure 9a: shifted critical path", figure_9a),
    "9b": ("Merak, figure 9b: stage-aware recomputation", figure_9b),
    "9c": ("Merak, figure 9c: sub-pipelining", figure_9c),
    "6": ("Merak, figure 6: best plan ÷ best baseline", figure_6),
    "over-zero": ("Merak, figure 6: best plan ÷ ZeRO, by what is assumed", over_zero),
}

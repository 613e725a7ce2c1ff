"""Figures that two papers print, beside the price that Merak gives the same jobs on their clusters.

    python benchmarks/papers.py [--figure table3 6 9a 9b 9c 14 15]

Nothing runs, and no device is needed: models are ordinary transformers models without weights, and
speeds are those of the library's data sheets and of the cluster files in `data`. The papers are
Merak (IEEE TPDS; table III and figures 6 and 9) and Chimera (SC21; figures 14 and 15). Of figures
that are pictures, the numbers that their text prints are in `data`; so are the layouts, as far as
they are printed. What is not printed (layers of Merak's models, microbatches) is said in a comment.

Merak's paper names no precision. All of its jobs are priced in float32, whose products an RTX 3090
computes as TF32: see docs/benchmarks.md for why. Attention is in parts, as models had it then.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tools import report
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from merak.core.errors import MerakError
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

DATA = Path(__file__).parent / "data"
MEBIBYTE = 2**20

GPTS = {
    "GPT-1.4B": (48, 1536, 16),
    "GPT-2.5B": (54, 1920, 20),
    "GPT-8.3B": (72, 3072, 24),
    "GPT-20B": (96, 4096, 32),
}
"""Layers, hidden size and heads. The paper prints the hidden sizes; these layers give the names."""


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table in `data`."""
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@cache
def cluster(name: str) -> Cluster:
    """A cluster in `data`."""
    return parse_cluster(str(DATA / name))


# Models


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of Merak's jobs."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of Chimera's jobs."""
    return torch.optim.SGD(parameters, lr=1e-4)


@cache
def gpt(layers: int, hidden: int, heads: int, batch: int) -> Workload:
    """A model of Merak's paper: sequences of 1,024."""
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=1024, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    workload = _workload(ModelSource(GPT2LMHeadModel, config, None), batch, 1024, adam)
    workload.common = ParallelOptions(tied_gradients="step")
    return workload


@cache
def chimera_model(name: str, batch: int) -> Workload:
    """A model of Chimera's paper, by its table 4: these sizes give the parameters it prints."""
    if name == "GPT-2":
        config = GPT2Config(
            n_layer=64, n_embd=1280, n_head=20, n_positions=1024, use_cache=False,
            tie_word_embeddings=False, attn_implementation="eager",
        )  # fmt: skip
        return _workload(ModelSource(GPT2LMHeadModel, config, None), batch, 632, sgd)
    config = BertConfig(
        num_hidden_layers=48, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    return _workload(ModelSource(BertForPreTraining, config, None), batch, 128, sgd)


def _workload(source: ModelSource, batch: int, sequence: int, optimizer: Any) -> Workload:
    return example_workload(
        source, global_batch=batch, sequence=sequence, dtype=torch.float32, optimizer=optimizer
    )


def equal_layers(workload: Workload, num_stages: int) -> tuple[int, ...]:
    """As many layers on every stage, the embedding on the first and the head on the last."""
    layers = (len(workload.graph(1).segments) - 2) // 2
    sizes = [2 * (layers // num_stages + (i < layers % num_stages)) for i in range(num_stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


# Merak: table III and figures 6 and 9


def table_3() -> list[dict[str, Any]]:
    """Memory and speed of GPT-2.5B on 8 GPUs, without and with stage-aware recomputation."""
    found: dict[tuple[str, str, str], Price] = {}
    rows = []
    for row in read("merak_tpds.csv"):
        if row["figure"] != "table III":
            continue
        key = (row["pp"], row["microbatch"], row["what"])
        if key not in found:
            recompute = "auto" if row["what"] == "stage-aware" else None
            found[key] = table_3_price(int(row["pp"]), int(row["microbatch"]), recompute)
        own = found[key]
        in_memory = row["unit"] == "MB"
        ours = max(own.peak_memory_bytes) / MEBIBYTE if in_memory else 128 / own.step_s
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
            }
        )
    return rows


def table_3_price(pp: int, microbatch: int, recompute: str | None) -> Price:
    """A row of table III: pp stages, 8 GPUs, a batch of 128, the shifted critical path."""
    candidate = Candidate(
        dp=8 // pp, pp=pp, microbatch=microbatch, num_microbatches=128 * pp // 8 // microbatch,
        schedule="shifted_critical_path", recompute=recompute,
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
    for tp, hidden in ((8, 1024), (16, 2048), (32, 4096)):
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


def fastest(layouts: Sequence[Candidate], workload: Workload, devices: Cluster) -> Price | None:
    """The fastest that fits. Of Merak's layouts, the three fastest are also filled with "auto"."""
    priced = fitting(workload, devices, layouts)
    if not priced:
        return None
    if layouts[0].schedule == "shifted_critical_path":
        # "auto" is not offered together with sub-pipelining and needs the time of a search.
        some = [own.candidate for own in priced[:3] if own.candidate.sub_pipelining == "off"]
        changed = [_replaced(candidate, recompute="auto") for candidate in some]
        priced += fitting(workload, devices, changed)
    return min(priced, key=lambda own: own.step_s)


def _replaced(candidate: Candidate, **fields: Any) -> Candidate:
    names = [name for name in Candidate.__slots__ if name not in fields and name != "partition"]
    return Candidate(**{name: getattr(candidate, name) for name in names}, **fields)


def fitting(workload: Workload, devices: Cluster, layouts: Iterable[Candidate]) -> list[Price]:
    """Prices of those that can be laid out and fit the memory, fastest first."""
    found = []
    for candidate in layouts:
        try:
            own = price(workload, devices, candidate)
        except MerakError:
            continue
        if own.fits:
            found.append(own)
    return sorted(found, key=lambda own: own.step_s)


def layout(own: Price) -> str:
    """A plan in a few words."""
    chosen = own.candidate
    return f"dp {chosen.dp} × tp {chosen.tp} × pp {chosen.pp}, microbatch {chosen.microbatch}"


# Chimera: figures 14 and 15

SCHEDULES = {"dapple": "1f1b"}
"""Names in Merak of the paper's schedules."""

ASYNCHRONOUS = ("pipedream", "pipedream_2bw")


SUPPOSED: dict[str, tuple[str, bool]] = {
    "": ("chimera_piz_daint.yaml", True),
    "the others reduce after the backward": ("chimera_piz_daint.yaml", False),
    "2.3 GB/s between nodes": ("chimera_slow_gloo.yaml", True),
    "2.3 GB/s, and the others reduce after it": ("chimera_slow_gloo.yaml", False),
}
"""Assumptions of figures 14 and 15: the network, and whether the schedules that Chimera is compared
with hide their reductions, as Merak does and torch's DDP over Gloo hardly did."""

_CLOSE = 0.1


def chimera_figure(figure: str) -> list[dict[str, Any]]:
    """Chimera's throughput ÷ that of each schedule, in the layout printed, and what moves it."""
    rows = [row for row in read("chimera.csv") if row["figure"] == figure]
    ratios: dict[str, dict[str, float]] = {row["schedule"]: {} for row in rows}
    words = {}
    for supposed, (name, hides) in SUPPOSED.items():
        base = 0.0
        for row in rows:
            own = row["schedule"]
            rate, words[own] = throughput(row, cluster(name), hides or own == "chimera")
            base = rate if own == "chimera" else base
            ratios[own][supposed] = base / rate if rate else 0.0
    return [
        {
            "schedule": row["schedule"],
            "layout": words[row["schedule"]],
            **compared(float(row["chimera_over"]), ratios[row["schedule"]]),
        }
        for row in rows
    ]


def compared(paper: float, ours: dict[str, float]) -> dict[str, Any]:
    """A line: the paper's figure, ours and their ratio, and the assumption that moves it most.

    Args:
        paper: its figure.
        ours: by assumption, "" for what is usually assumed; 0 for what does not fit.
    """
    usual = ours[""] / paper
    line = {"paper": paper, "Merak": round(ours[""], 2), "÷ paper": round(usual, 2)}
    others = {name: own / paper for name, own in ours.items() if name and own}
    if abs(usual - 1) <= _CLOSE or not others:
        return {**line, "what moves it most": ""}
    name = min(others, key=lambda name: abs(others[name] - 1))
    moved = f"{name}: {ours[name]:.2f} ({others[name]:.2f} of the paper's)"
    if abs(others[name] - 1) > _CLOSE:
        moved = f"not explained; nearest, {moved}"
    return {**line, "what moves it most": moved}


def throughput(row: dict[str, str], devices: Cluster, hides: bool = True) -> tuple[float, str]:
    """Samples per second of a row, by the best of what is not printed, and the layout."""
    workload = chimera_model(row["model"], int(row["batch"]))
    workload.kernels = replace(workload.kernels, hides_reductions=hides)
    depths = [int(row["pp"])] if row["pp"] else [8, 16, 32]
    batches = [int(row["microbatch"])] if row["microbatch"] else [1, 2, 4, 8, 12, 16, 32]
    best, words = 0.0, "does not fit"
    for pp in depths:
        for microbatch in batches:
            dp = int(row["nodes"]) // pp
            count, rest = divmod(int(row["batch"]), dp * microbatch)
            if rest or not count or (row["schedule"] == "pipedream" and count > 1):
                continue
            rate = _rate(workload, devices, row, (pp, dp, microbatch, count))
            if rate > best:
                best, words = rate, f"W={dp}, D={pp}, B={microbatch}"
    return best, words


def _rate(
    workload: Workload, devices: Cluster, row: dict[str, str], sizes: tuple[int, int, int, int]
) -> float:
    """Samples per second; of an asynchronous schedule those of later updates, without the fill."""
    pp, dp, microbatch, count = sizes
    name = SCHEDULES.get(row["schedule"], row["schedule"])

    def seconds(updates: int) -> Price:
        options = {"microbatches_per_update": count} if name == "pipedream_2bw" else {}
        candidate = Candidate(
            dp=dp, pp=pp, microbatch=microbatch, num_microbatches=count * updates, schedule=name,
            schedule_options=options, recompute="full" if row["recompute"] == "yes" else "off",
            partition=equal_layers(workload, pp),
        )  # fmt: skip
        return price(workload, devices, candidate)

    try:
        if name not in ASYNCHRONOUS:
            own = seconds(1)
            return int(row["batch"]) / own.step_s if own.fits else 0.0
        least = max(4, 4 * pp // count)
        few, many = seconds(least), seconds(2 * least)
    except MerakError:
        return 0.0
    return int(row["batch"]) * least / (many.step_s - few.step_s) if many.fits else 0.0


TABLES: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "table3": ("Merak, table III", table_3),
    "9a": ("Merak, figure 9a: shifted critical path", figure_9a),
    "9b": ("Merak, figure 9b: stage-aware recomputation", figure_9b),
    "9c": ("Merak, figure 9c: sub-pipelining", figure_9c),
    "6": ("Merak, figure 6: best plan ÷ best baseline", figure_6),
    "14": ("Chimera, figure 14: Bert-48 on 64 nodes", lambda: chimera_figure("14")),
    "15": ("Chimera, figure 15: GPT-2 on 2,048 nodes", lambda: chimera_figure("15")),
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--figure", nargs="+", choices=list(TABLES), default=list(TABLES))
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    report.show({TABLES[name][0]: TABLES[name][1]() for name in args.figure}, args.json)


if __name__ == "__main__":
    main()

"""Figures of Chimera's paper, beside our prices."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from merak.core.errors import MerakError
from merak.plan.cluster.cluster import Cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from tools.paper_jobs import chimera_model, cluster, compared, equal_layers, is_near, read

SCHEDULES = {"dapple": "1f1b"}
"""Names in Merak of the paper's schedules."""

ASYNCHRONOUS = ("pipedream", "pipedream_2bw")


SUPPOSED: dict[str, tuple[str, bool]] = {
    "": ("chimera_piz_daint.yaml", True),
    "the others reduce after the backward": ("chimera_piz_daint.yaml", False),
    "2.3 GB/s between nodes": ("chimera_slow_gloo.yaml", True),
    "2.3 GB/s, and the others reduce after it": ("chimera_slow_gloo.yaml", False),
}
"""Assumptions of all figures but 16: the network, and whether the schedules that Chimera is
compared with hide their reductions, as Merak does and torch's DDP over Gloo hardly did."""

FURTHER = {
    "0.6 GB/s between nodes": ("chimera_stream_gloo.yaml", True),
    "0.6 GB/s, and the others reduce after it": ("chimera_stream_gloo.yaml", False),
}
"""Assumptions where none of these is near: a sixteenth of the upper bound."""

V100S = {
    "": ("v100-32gb:8x4", True),
    "the others reduce after the backward": ("v100-32gb:8x4", False),
    "Gloo's rates": ("chimera_v100_gloo.yaml", True),
    "Gloo's rates, and the others reduce after it": ("chimera_v100_gloo.yaml", False),
    "0.6 GB/s, and the others reduce after it": ("chimera_v100_stream.yaml", False),
}
"""Assumptions of figure 16; Gloo sends from host memory, and NVLink is of no use to it."""

NETWORKS = {
    "TCP over Aries": "chimera_piz_daint.yaml",
    "2.3 GB/s between nodes": "chimera_slow_gloo.yaml",
    "0.6 GB/s between nodes": "chimera_stream_gloo.yaml",
}

DEPTHS = (8, 16, 32)
MICROBATCHES = (1, 2, 4, 8, 12, 16, 32)
LARGE_BATCHES = (1024, 2048, 4096)
"""Of figures 17 and 18, whose text averages over batches from 1,024 on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A line of a figure; depths and microbatches are all that are tried for the best.

    Args:
        model: as of `chimera_model`.
        nodes: GPUs.
        batch: samples of a step.
        schedule: by the paper's name.
        depths: pipeline degrees D.
        microbatches: their samples B.
        recompute: whether all activations are recomputed.
        options: of the schedule, by name.
    """

    model: str = "Bert-48"
    nodes: int = 32
    batch: int = 512
    schedule: str = "chimera"
    depths: tuple[int, ...] = DEPTHS
    microbatches: tuple[int, ...] = MICROBATCHES
    recompute: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def printed(row: Mapping[str, str]) -> Job:
    """Job of a row of the paper's numbers."""
    return Job(
        model=row["model"],
        nodes=int(row["nodes"]),
        batch=int(row["batch"]),
        schedule=row["schedule"],
        depths=(int(row["pp"]),) if row["pp"] else DEPTHS,
        microbatches=(int(row["microbatch"]),) if row["microbatch"] else MICROBATCHES,
        recompute=row["recompute"] == "yes",
    )


def chimera_figure(figure: str) -> Iterator[dict[str, Any]]:
    """Chimera's throughput ÷ that of each schedule, in the layout printed, and what moves it."""
    rows = [row for row in read("chimera.csv") if row["figure"] == figure]
    base = next(printed(row) for row in rows if row["schedule"] == "chimera")
    for row in rows:
        yield line(row["schedule"], float(row["chimera_over"]), [(base, printed(row))])


def figure_14_parts() -> Iterator[dict[str, Any]]:
    """What PipeDream and 2BW lose in figure 14 by updates, the size of microbatches and the fill.

    PipeDream updates and reduces after every microbatch, whose size its versions of the weights
    bound. The fill is that of a run of the fewest updates that fill the pipeline.
    """
    rows = [row for row in read("chimera.csv") if row["figure"] == "14"]
    jobs = {row["schedule"]: printed(row) for row in rows}
    chimera, _ = throughput(jobs["chimera"], *SUPPOSED[""])
    workload, devices = chimera_model("Bert-48"), cluster(SUPPOSED[""][0])
    workload.kernels = replace(workload.kernels, hides_reductions=True)
    for schedule, microbatches in (("pipedream", (12, 16, 8, 4)), ("pipedream_2bw", (16, 8, 4))):
        job = jobs[schedule]
        (pp,) = job.depths
        dp = job.nodes // pp
        for microbatch in microbatches:
            batch = dp * microbatch if schedule == "pipedream" else job.batch
            sizes = (pp, dp, microbatch, batch // dp // microbatch)
            updates, few, many = _updates(workload, devices, job, sizes)
            later_s = many.step_s - few.step_s
            sent_s = many.exposed_communication_s - few.exposed_communication_s
            stepped_s = many.optimizer_s - few.optimizer_s
            yield {
                "schedule": schedule,
                "layout": f"W={dp}, D={pp}, B={microbatch}",
                "Chimera ÷ it": round(chimera * later_s / updates / batch, 2),
                "reductions": f"{sent_s / later_s:.0%}",
                "updates": f"{stepped_s / later_s:.0%}",
                "Chimera ÷ it, with its fill": round(chimera * few.step_s / updates / batch, 2),
            }


def figure_10() -> Iterator[dict[str, Any]]:
    """Bert-48 on 32 nodes, 512 samples: the best layouts of the baselines, by the paper and us.

    Of 4 stages or more; with 2, all would be faster by our price.
    """
    best = {
        "dapple": ((4, 4), False),
        "gpipe": ((4, 4), True),
        "gems": ((4, 32), False),
        "pipedream_2bw": ((4, 16), True),
    }
    for schedule, ((depth, microbatch), recompute) in best.items():
        every = Job(schedule=schedule, depths=(4, 8, 16), recompute=recompute)
        own = replace(every, depths=(depth,), microbatches=(microbatch,))
        (ours, words), (theirs, paper) = (throughput(job, *SUPPOSED[""]) for job in (every, own))
        yield {
            "schedule": schedule,
            "paper's best": paper,
            "best by price": words,
            "the paper's ÷ it": round(theirs / ours, 3),
        }


def figure_12() -> list[dict[str, Any]]:
    """Reductions of the middle stages left to the end ÷ begun eagerly, on 64 nodes."""
    own = Job(nodes=64, batch=1024, depths=(4,), microbatches=(8,))
    eager = replace(own, options=(("eager_middle", True),))
    return [line("12: middle stages eagerly", 1.09, [(own, eager)])]


def figure_13() -> list[dict[str, Any]]:
    """GPT-2 on 512 nodes with 512 samples: 8 stages with recomputation ÷ 32 stages without."""
    own = Job(model="GPT-2", nodes=512, depths=(32,))
    return [
        line("13: 32 stages without", 1.017, [(replace(own, depths=(8,), recompute=True), own)])
    ]


def figure_16() -> Iterator[dict[str, Any]]:
    """Bert-48 of 512 tokens on 32 V100s; the text prints the ranges of two kinds of schedules.

    Layouts are not printed; those of 4 stages or more are tried, as on the other cluster.
    """
    base = Job(model="Bert-48 of 512 tokens", batch=256, depths=(4, 8))
    for schedule, paper in (("dapple", 1.10), ("gems", 2.39), ("pipedream_2bw", 1.05)):
        yield line(f"16: {schedule}", paper, [(base, replace(base, schedule=schedule))], V100S)
    # The largest batch of which PipeDream's one microbatch for an update fits, and smaller ones.
    for batch in (32, 16, 8):
        other = replace(base, schedule="pipedream", batch=batch)
        yield line(f"16: pipedream, {batch} samples", 1.89, [(base, other)], V100S)


def figure_17() -> Iterator[dict[str, Any]]:
    """Bert-48 on 32 nodes, averages over large batches."""
    for schedule, paper, recompute in (
        ("dapple", 1.06, False), ("gems", 2.07, False), ("gpipe", 1.13, True)
    ):  # fmt: skip
        pairs = []
        for batch in LARGE_BATCHES:
            base = Job(batch=batch, depths=(4,), microbatches=(8,))
            other = replace(base, schedule=schedule, recompute=recompute, microbatches=MICROBATCHES)
            pairs.append((base, other))
        yield line(f"17: {schedule}", paper, pairs)


def figure_18() -> Iterator[dict[str, Any]]:
    """GPT-2 on 512 nodes, averages over large batches: forward doubling in 8 stages."""
    for schedule, paper in (
        ("gpipe", 1.18), ("dapple", 1.34), ("gems", 2.60), ("pipedream_2bw", 1.13)
    ):  # fmt: skip
        pairs = []
        for batch in LARGE_BATCHES:
            base = Job(model="GPT-2", nodes=512, batch=batch, depths=(8,), recompute=True)
            other = replace(base, schedule=schedule, recompute=schedule != "gems")
            pairs.append((replace(base, options=(("method", "forward_doubling"),)), other))
        yield line(f"18: {schedule}", paper, pairs)


def figure_19() -> Iterator[dict[str, Any]]:
    """GPT-2 of 32 layers, 64 samples on 64 nodes: one, two and four pipelines."""
    for depth, network in itertools.product((32, 16), NETWORKS):
        own = Job(model="GPT-2 of 32 layers", nodes=64, batch=64, depths=(depth,))
        ways = {
            "1 pipeline": replace(own, schedule="dapple"),
            "2": own,
            "4": replace(own, options=(("pairs", 2),)),
        }
        rates = {name: throughput(job, NETWORKS[network], True)[0] for name, job in ways.items()}
        shares = {name: round(rate / rates["2"], 3) for name, rate in rates.items()}
        paper = "four are best" if depth == 32 else "two are better than four"
        yield {"D": depth, "network": network, "paper": paper, **shares}


def efficiency() -> list[dict[str, Any]]:
    """Section 4.2.3: GPT-2's throughput on 2,048 nodes ÷ four times that on 512, by Chimera."""
    own = Job(model="GPT-2", nodes=2048, batch=2048, depths=(32,))
    small = replace(own, nodes=512, batch=512)
    found = {
        supposed: throughput(own, *how)[0] / throughput(small, *how)[0] / 4
        for supposed, how in SUPPOSED.items()
        if how[1]  # Chimera hides its own
    }
    return [compared(0.914, found)]


def line(
    what: str,
    paper: float,
    pairs: Sequence[tuple[Job, Job]],
    supposed: Mapping[str, tuple[str, bool]] = SUPPOSED,
) -> dict[str, Any]:
    """Line of a figure: the mean of the first jobs' throughput ÷ the others', and what moves it.

    Args:
        what: the schedule that is compared with.
        paper: its number.
        pairs: of jobs.
        supposed: assumptions; of the first jobs, reductions are always hidden. None is tried where
            the usual ones are near.
    """
    ratios: dict[str, float] = {}
    words = ""
    every = {**supposed, **(FURTHER if supposed is SUPPOSED else {})}
    for name, (devices, hides) in every.items():
        if name in FURTHER and any(is_near(own, paper) for own in ratios.values()):
            break
        own = []
        for base, other in pairs:
            ours, _ = throughput(base, devices, True)
            theirs, layout = throughput(other, devices, hides or other == base)
            words = words or layout
            own.append(ours / theirs if theirs else 0.0)
        ratios[name] = statistics.mean(own) if all(own) else 0.0
        if not name and is_near(ratios[name], paper):
            break
    return {"schedule": what, "layout": words, **compared(paper, ratios)}


@cache
def throughput(job: Job, devices: str, hides: bool) -> tuple[float, str]:
    """Samples per second by the best of its depths and microbatches, and that layout.

    Args:
        job: one.
        devices: a cluster.
        hides: whether reductions run beside the backward.
    """
    workload = chimera_model(job.model)
    workload.kernels = replace(workload.kernels, hides_reductions=hides)
    best, words = 0.0, "does not fit"
    for pp in job.depths:
        for microbatch in job.microbatches:
            dp = job.nodes // pp
            count, rest = divmod(job.batch, dp * microbatch)
            if rest or not count or (job.schedule == "pipedream" and count > 1):
                continue
            rate = _rate(workload, cluster(devices), job, (pp, dp, microbatch, count))
            if rate > best:
                best, words = rate, f"W={dp}, D={pp}, B={microbatch}"
    return best, words


def _rate(
    workload: Workload, devices: Cluster, job: Job, sizes: tuple[int, int, int, int]
) -> float:
    """Samples per second; of an asynchronous schedule those of later updates, without the fill."""
    try:
        if job.schedule not in ASYNCHRONOUS:
            own = _priced(workload, devices, job, sizes, 1)
            return job.batch / own.step_s if own.fits else 0.0
        updates, few, many = _updates(workload, devices, job, sizes)
    except MerakError:
        return 0.0
    return job.batch * updates / (many.step_s - few.step_s) if many.fits else 0.0


def _updates(
    workload: Workload, devices: Cluster, job: Job, sizes: tuple[int, int, int, int]
) -> tuple[int, Price, Price]:
    """A number of updates that fills the pipeline, their price, and that of twice as many."""
    pp, _, _, count = sizes
    least = max(4, 4 * pp // count)
    few, many = (_priced(workload, devices, job, sizes, num * least) for num in (1, 2))
    return least, few, many


def _priced(
    workload: Workload, devices: Cluster, job: Job, sizes: tuple[int, int, int, int], updates: int
) -> Price:
    pp, dp, microbatch, count = sizes
    own = {"microbatches_per_update": count} if job.schedule == "pipedream_2bw" else {}
    candidate = Candidate(
        dp=dp, pp=pp, microbatch=microbatch, num_microbatches=count * updates,
        schedule=SCHEDULES.get(job.schedule, job.schedule),
        schedule_options={**own, **dict(job.options)},
        recompute="full" if job.recompute else "off", partition=equal_layers(workload, pp),
    )  # fmt: skip
    return price(workload, devices, candidate)


FIGURES: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]]]] = {
    "10": ("Chimera, figure 10: the best layouts of Bert-48 on 32 nodes", figure_10),
    "12": ("Chimera, figure 12: middle stages reduced eagerly", figure_12),
    "13": ("Chimera, figure 13: 8 stages ÷ 32 of GPT-2 on 512 nodes", figure_13),
    "14": ("Chimera, figure 14: Bert-48 on 64 nodes", lambda: chimera_figure("14")),
    "14-parts": ("Chimera, figure 14: PipeDream and 2BW, by what they lose", figure_14_parts),
    "15": ("Chimera, figure 15: GPT-2 on 2,048 nodes", lambda: chimera_figure("15")),
    "16": ("Chimera, figure 16: Bert-48 on 32 V100s", figure_16),
    "17": ("Chimera, figure 17: large batches of Bert-48 on 32 nodes", figure_17),
    "18": ("Chimera, figure 18: large batches of GPT-2 on 512 nodes", figure_18),
    "19": ("Chimera, figure 19: more than two pipelines", figure_19),
    "efficiency": ("Chimera, section 4.2.3: weak scaling of GPT-2, 512 to 2,048 nodes", efficiency),
}

"""Prices of plans against real runs: ranks over gloo, priced from a profile of them alone.

A small GPT-2 trains in at least twelve layouts on four ranks, on one host or on two (network
namespaces with a limited rate). `merak.plan.price` predicts each from a profile that the same kind
of ranks have measured before. Where there are fewer cores than ranks, computation is asleep: every
pass of a segment lasts as long as its parameters and samples say, beside which its real computation
and Python run; transfers, collectives, optimizer and engine are real. The profile is measured with
the same sleeps, by the same code. The table has predicted and measured seconds of a step, and the
plan that is predicted fastest beside the fastest one measured. Run it on a machine at rest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools import report
from tools.lasting import Seconds, make_last
from tools.link import slow_link

import merak
from merak.engine.profile.links import SIZES
from merak.engine.profile.measure import ProfiledModel, measure_profile
from merak.graph.joint.segment import JointSegment
from merak.plan.cluster.from_profile import cluster_of
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.plan.profile.profile_file import load_profile, save_profile
from merak.zoo.batches.batch import example_columns
from merak.zoo.batches.columns import draw_batch
from merak.zoo.model_source import ModelSource, resolve_model
from merak.zoo.workload import example_workload

RANKS = 4
GLOBAL_BATCH = 16
SEQUENCE = 32
SMALL = {"n_layer": 6, "n_embd": 96, "n_head": 4, "vocab_size": 512, "n_positions": 64}
FIXED = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}

PLANS = tuple(
    Candidate(
        dp=dp,
        tp=tp,
        pp=pp,
        microbatch=microbatch,
        num_microbatches=GLOBAL_BATCH // dp // microbatch,
        **others,
    )
    for dp, tp, pp, microbatch, others in (
        (4, 1, 1, 1, {}),
        (4, 1, 1, 2, {}),
        (4, 1, 1, 2, {"zero": 1}),
        (4, 1, 1, 2, {"zero": 2}),
        (4, 1, 1, 2, {"zero": 3}),
        (4, 1, 1, 2, {"recompute": "full"}),
        (2, 1, 2, 1, {}),
        (2, 1, 2, 2, {}),
        (2, 1, 2, 2, {"schedule": "gpipe"}),
        (2, 1, 2, 2, {"recompute": "full"}),
        (1, 1, 4, 1, {}),
        (1, 1, 4, 2, {}),
        (1, 1, 4, 2, {"schedule": "zero_bubble_h1"}),
        (1, 1, 4, 1, {"schedule": "gpipe", "recompute": "full"}),
        (2, 2, 1, 2, {}),
        (1, 2, 2, 2, {}),
        (1, 4, 1, 4, {}),
    )
)


def source_of(name: str) -> ModelSource:
    """The model."""
    return resolve_model(name, {**SMALL, **FIXED})


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def workload_of(source: ModelSource) -> Workload:
    return example_workload(
        source, global_batch=GLOBAL_BATCH, sequence=SEQUENCE, optimizer=optimizer
    )


def batch_of(source: ModelSource, samples: int) -> dict[str, torch.Tensor]:
    columns = example_columns(source.model_class, source.config, batch=samples, sequence=SEQUENCE)
    return draw_batch(columns, seed=samples)


# ---- computation that lasts a known time ----


def fall_asleep(million_s: float) -> None:
    """Let every pass of a segment last a known time, in the engine and in the profile.

    Args:
        million_s: seconds of a forward for a million parameters and one sample. A backward takes
            twice as long, and W half of it.
    """

    def seconds(segment: JointSegment) -> Seconds:
        shapes: dict[str, list[torch.Size]] = {"parameter": [], "value": []}
        for node in segment.graph.find_nodes(op="placeholder"):
            shapes.setdefault(node.meta["kind"].value, []).append(node.meta["tensor"].shape)
        (end,) = segment.graph.find_nodes(op="output")
        made = [node.meta["tensor"].shape for node in end.all_input_nodes]
        samples = (shapes["value"] or made)[0][0]
        forward_s = million_s * samples * sum(map(math.prod, shapes["parameter"])) / 1e6
        return Seconds(forward_s, forward_s, 2 * forward_s, forward_s)

    make_last(seconds)


# ---- what a rank does ----


def rank_job(options: argparse.Namespace) -> None:
    """Measure a profile, or the steps of the plans of one mesh."""
    dp, tp, pp = options.degrees
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    torch.set_num_threads(1)
    if options.million_ms:
        fall_asleep(options.million_ms / 1e3)
    source = source_of(options.model)
    if options.job == "profile":
        plans = chosen_plans(options).values()
        sizes, degrees = {own.microbatch for own in plans}, {own.tp for own in plans}
        model = ProfiledModel(
            workload_of(source), partial(batch_of, source), sorted(sizes), sorted(degrees)
        )
        profile = measure_profile(
            mesh,
            model,
            sizes=options.sizes,
            round_s=options.round_ms / 1e3,
            compute=partial(time.sleep, 1e-3) if options.million_ms else None,
        )
        if mesh.rank == 0:
            save_profile(Path(options.folder, "profile.json"), profile)
    else:
        found = {
            str(number): steps_of(plan, source, options)
            for number, plan in chosen_plans(options).items()
            if (plan.dp, plan.tp, plan.pp) == (dp, tp, pp)
        }
        if mesh.rank == 0:
            Path(options.folder, f"steps-{dp}-{tp}-{pp}.json").write_text(json.dumps(found))
    dist.barrier()


def steps_of(plan: Candidate, source: ModelSource, options: argparse.Namespace) -> float:
    """Median seconds from the end of a step to that of the next one.

    What a step leaves to run beside the next one, such as ZeRO's gathers, is hidden as in a job.
    """
    batch = batch_of(source, plan.microbatch * plan.num_microbatches)
    model = merak.parallelize(
        source.build().train(),
        batch,
        optimizer=optimizer,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        recompute=plan.recompute,
        zero=plan.zero,
        sub_pipelining=plan.sub_pipelining,
        partition=plan.partition or partition_of(plan, options),
    )
    dist.barrier()
    ends = []
    for _ in range(options.warmup + options.steps):
        model.step(batch)
        ends.append(time.perf_counter())
    seconds = [end - start for start, end in pairwise(ends)]
    return statistics.median(seconds[-options.steps :])


def partition_of(plan: Candidate, options: argparse.Namespace) -> list[int] | None:
    """The stages that the price has balanced; all ranks read them."""
    content = json.loads(Path(options.folder, "prices.json").read_text())
    found: list[int] = content[str(PLANS.index(plan))]["partition"]
    return found if plan.pp > 1 else None


# ---- what is made of it ----


def start(options: argparse.Namespace, job: str, degrees: tuple[int, int, int]) -> None:
    """Run ranks with torchrun, on this host or on two, and wait for them."""
    script = [str(Path(__file__).resolve()), "--job", job, "--folder", options.folder]
    script += ["--degrees", *map(str, degrees), "--million-ms", str(options.million_ms)]
    script += ["--model", options.model, "--steps", str(options.steps)]
    script += ["--round-ms", str(options.round_ms), "--sizes", *map(str, options.sizes)]
    script += ["--warmup", str(options.warmup), "--plans", *map(str, options.plans)]
    log = Path(options.folder, f"{job}-{'-'.join(map(str, degrees))}.log")
    if options.network is None:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *script]
        with log.open("ab") as out:
            running = [subprocess.Popen([sys.executable, *run], stdout=out, stderr=out)]
    else:
        running = [host.torchrun(RANKS // 2, script, log) for host in options.network.hosts]
    if any([one.wait(options.patience) for one in running]):
        raise SystemExit(log.read_text(errors="replace")[-4000:])


def predictions(options: argparse.Namespace) -> dict[str, Any]:
    """Prices of all plans, from the profile alone."""
    cluster = cluster_of(load_profile(Path(options.folder, "profile.json")))
    workload = workload_of(source_of(options.model))
    plans = chosen_plans(options)
    prices = {number: price(workload, cluster, plan) for number, plan in plans.items()}
    found = {
        str(number): {"step_s": own.step_s, "partition": own.candidate.partition}
        for number, own in prices.items()
    }
    Path(options.folder, "prices.json").write_text(json.dumps(found))
    return found


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Profile, price, run, and put side by side."""
    start(options, "profile", (RANKS, 1, 1))
    prices = predictions(options)
    measured: dict[str, float] = {}
    for degrees in dict.fromkeys((o.dp, o.tp, o.pp) for o in chosen_plans(options).values()):
        start(options, "steps", degrees)
        file = Path(options.folder, f"steps-{'-'.join(map(str, degrees))}.json")
        measured |= json.loads(file.read_text())
    rows, errors = [], []
    for number, plan in chosen_plans(options).items():
        predicted, taken = prices[str(number)]["step_s"], measured[str(number)]
        errors.append(abs(predicted / taken - 1))
        rows.append(
            {
                "plan": described(plan),
                "predicted ms": round(1e3 * predicted, 1),
                "measured ms": round(1e3 * taken, 1),
                "error %": round(100 * (predicted / taken - 1), 1),
            }
        )
    chosen = min(prices, key=lambda number: prices[number]["step_s"])
    best = min(measured, key=lambda number: measured[number])
    summary = {
        "plans": len(rows),
        "within 10 %": sum(error <= 0.10 for error in errors),
        "mean error %": round(100 * statistics.mean(errors), 1),
        "worst %": round(100 * max(errors), 1),
        "chosen": described(PLANS[int(chosen)]),
        "best": described(PLANS[int(best)]),
        "chosen is slower by %": round(100 * (measured[chosen] / measured[best] - 1), 1),
    }
    return {"Plans": rows, "Together": [summary]}


def chosen_plans(options: argparse.Namespace) -> dict[int, Candidate]:
    """The plans that run, by their numbers."""
    return {number: PLANS[number] for number in options.plans}


def described(plan: Candidate) -> str:
    usual = Candidate(dp=0, tp=0, pp=0, num_microbatches=0)
    names = [field.name for field in fields(plan)]
    own = [name for name in names if getattr(plan, name) != getattr(usual, name)]
    return " ".join(f"{name}={getattr(plan, name)}" for name in own)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--model", default="GPT2LMHeadModel", help="a class that takes n_layer")
    parser.add_argument("--million-ms", type=float, default=60.0, help="sleep; 0 computes")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, 1 at least")
    parser.add_argument("--round-ms", type=float, default=20.0, help="of the profile's calls")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="bytes of the profile's messages"
    )
    parser.add_argument("--rate", help="of the network of two hosts, such as 200mbit; one host")
    parser.add_argument("--patience", type=float, default=1200.0, help="seconds of a job at most")
    parser.add_argument("--plans", type=int, nargs="+", default=list(range(len(PLANS))))
    parser.add_argument("--folder", default="", help="to keep the profile and logs in")
    parser.add_argument("--job", choices=("profile", "steps"), help=argparse.SUPPRESS)
    parser.add_argument("--degrees", type=int, nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.job:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-plans-") as folder:
        options.folder = options.folder or folder
        Path(options.folder).mkdir(exist_ok=True)
        with slow_link(options.rate) as options.network:
            report.show(compare(options), options.json)


if __name__ == "__main__":
    main()

"""Layouts for unequal devices and unequal parts of a model, priced beside Merak's best.

    python -m benchmarks.unequal_devices [--row TEXT] [--techniques batches degrees parts]
        [--layers N]

For every job of `data/unequal_devices.csv`: the step of the fastest plan that `merak plan` finds,
and that of the best layout with

- batches of unequal size: every replica on devices of one kind, with as many microbatches of a
  step as makes all replicas take as long (Whale, HetPipe);
- degrees of its own for each stage, with resharding between them (DAPPLE, Alpa, Piper, Galvatron);
- any parts of the model on a device, however many and wherever in the model (FTPipe),

each by a search of its own over the price of `merak plan`. "ahead" is how much less time a step
takes than with Merak's best. No device is needed.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tools import report
from benchmarks.tools.unequal import AnyParts, OwnDegrees, Staged, UnequalBatches
from merak.cli.plan.plan import find_plans
from merak.cli.plan.planned import Planned
from merak.cli.plan.request import PlanRequest
from merak.core.errors import MerakError
from merak.core.units import seconds
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.search.explain import degrees
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import NO_PIPELINE
from merak.plan.search.search import job_of, search_job

JOBS = Path(__file__).parent / "data" / "unequal_devices.csv"
TECHNIQUES = ("batches", "degrees", "parts")
PLAIN = ("1f1b", "zero_bubble_h1", NO_PIPELINE)
"""Kinds of plans that have one stage on each rank, as those with degrees of its own have."""


def jobs() -> list[dict[str, str]]:
    """Rows of the table of jobs."""
    with JOBS.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def planned(job: Mapping[str, str], layers: int | None) -> Planned:
    """The plans of a job, of so many layers where that is given."""
    config = json.loads(job["config"])
    if layers is not None:
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    request = PlanRequest(
        model=job["class"],
        config=json.dumps(config),
        cluster=job["cluster"],
        global_batch=int(job["batch"]),
        sequence=int(job["tokens"]),
        dtype="bfloat16",
        common={"master_weights": True, "tied_gradients": "step"},
        top=10,
    )
    return find_plans(request)


def with_batches(found: Planned, cluster: Cluster) -> tuple[float, str]:
    """Seconds of a step with batches of unequal size, and the layout."""
    if len(cluster.nodes) == 1:
        return found.ranking.plans[0].step_s, "equal replicas"
    pricing, pinned = UnequalBatches(found.workload, cluster), Pinned(cp=1)
    job = job_of(found.workload, cluster, pinned)
    # As many samples for each device as a whole number of microbatches of any size has.
    each = 2 ** int(math.log2(max(1, found.workload.global_batch / cluster.num_devices)))
    job = replace(job, global_batch=each * cluster.num_devices)
    ranking = search_job(job, pricing, pinned, refusal=pricing.problem)
    if not ranking.plans:
        return float("inf"), "nothing fits"
    best = ranking.plans[0]
    counts = pricing.counts[str(best.candidate)]
    return best.step_s, f"{words(best)}, {' and '.join(map(str, counts))} microbatches"


def with_degrees(found: Planned, cluster: Cluster) -> tuple[float, str]:
    """Seconds of a step with degrees of its own for each stage, and the layout."""
    job = job_of(found.workload, cluster, Pinned())
    fitting = tuple(tp for tp in (1, 2, 4, 8) if job.problem(tp, 1, 1) is None)
    search = OwnDegrees(found.workload, cluster, fitting)
    unequal, equal = search.best()
    if equal is not None and len(cluster.nodes) == 1:
        check(search, equal)
    if unequal is None:
        return float("inf"), "nothing fits"
    what = f"{unequal.schedule}, {unequal.samples} samples, {unequal.recompute}: "
    return unequal.step_s, what + "; ".join(map(str, unequal.parts))


def check(search: OwnDegrees, own: Staged) -> None:
    """Check that stages of equal degrees have, composed, the price that Merak has of their layout.

    Raises:
        SystemExit: they have another.
    """
    whole = price(search.workload, search.cluster, search.candidate(own, 0))
    if not math.isclose(own.step_s, whole.step_s, rel_tol=1e-6):
        raise SystemExit(f"{own} is priced {whole.step_s}")


def with_parts(found: Planned, cluster: Cluster) -> tuple[float, str]:
    """Seconds of a step with any parts of the model on a device, and the layout."""
    del cluster  # The plans' own: without nodes that hold up the others.
    bases = {}
    for own in found.ranking.priced:
        if own.candidate.pp > 1:
            candidate = own.candidate
            bases.setdefault((candidate.dp, candidate.tp, candidate.pp, candidate.microbatch,
                              candidate.recompute), candidate)  # fmt: skip
    best: Price | None = None
    for base in list(bases.values())[:4]:
        try:
            own = AnyParts(found.workload, found.cluster, base).best()
        except MerakError:
            continue
        if own is not None and (best is None or own.step_s < best.step_s):
            best = own
    if best is None:
        return float("inf"), "nothing fits"
    sizes = " ".join(map(str, best.candidate.partition or ()))
    return best.step_s, f"{degrees(best.candidate)}, stages of {sizes} segments"


def words(own: Price) -> str:
    """A plan in a few words."""
    chosen = own.candidate
    return f"{degrees(chosen)}, {chosen.schedule}, microbatch {chosen.microbatch}"


SEARCHES = {"batches": with_batches, "degrees": with_degrees, "parts": with_parts}


def main() -> None:
    """Price the jobs."""
    parser = report.parser(__doc__)
    parser.add_argument("--row", default="", help="jobs with this text in model or cluster")
    parser.add_argument("--techniques", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES))
    parser.add_argument("--layers", type=int, help="of every model, in place of its own")
    chosen = parser.parse_args()
    rows, layouts = [], []
    for job in jobs():
        if chosen.row not in f"{job['model']} {job['cluster']}":
            continue
        found, cluster = planned(job, chosen.layers), parse_cluster(job["cluster"])
        today = found.ranking.plans[0]
        row: dict[str, Any] = {
            "job": f"{job['model']}, {job['batch']} × {int(job['tokens']):,}",
            "devices": job["cluster"],
            "Merak's best": seconds(today.step_s),
        }
        where = "" if found.cluster_name == job["cluster"] else f" of {found.cluster_name}"
        layouts.append({"job": row["job"], "with": "today", "layout": words(today) + where})
        for name in chosen.techniques:
            step_s, layout = SEARCHES[name](found, cluster)
            row[f"{name}, ahead"] = f"{1 - step_s / today.step_s:+.1%}"
            if name == "degrees":
                plain = min(
                    own.step_s for kind, own in found.ranking.kinds.items() if kind in PLAIN
                )
                row["of one stage a rank"] = f"{1 - step_s / plain:+.1%}"
            layouts.append({"job": row["job"], "with": name, "layout": layout})
            print(row["job"], name, f"{step_s:.4g}", layout, file=sys.stderr, flush=True)
        rows.append(row)
    report.show({"Steps": rows, "Layouts": layouts}, chosen.json)


if __name__ == "__main__":
    main()

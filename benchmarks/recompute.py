"""Stage-aware recomputation in simulation: GPT-2.5B on 8 GPUs of 24 GB, beside the paper's figures.

Table III of the paper (arXiv 2206.04959) gives samples per second and memory without and with
stage-aware recomputation at a global batch of 128; figure 9b, the gain at 8 stages when α_1 grows.
Here memory is Merak's own forecast, of the kernels of an RTX 3090, and time is the simulated
iteration of the same model, traced, with the speeds of its data sheet; all in float32, attention in
parts, as in benchmarks/papers.py. Communication is left out. "default"
recomputes everything but the last stage, as the shifted critical path does; "formula" is the
paper's recursion with the largest α_1 that fits; "auto" chooses segments one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tools import report
from tools.plans import first_of_stages, paper_ratios, pipeline_costs
from transformers import GPT2Config, GPT2LMHeadModel

from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.weights.empty_weights import empty_weights
from merak.plan import EngineOptions, Forecast, StepPlans, preset
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.balance import balance
from merak.plan.cluster.fit import usable_on
from merak.plan.cost.kernels.by_rules import segment_costs
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.layout import Layout
from merak.schedule import simulate

NUM_GPUS, GLOBAL_BATCH, SEQUENCE = 8, 128, 1024
HIDDEN, LAYERS, HEADS = 1920, 54, 20
"""GPT-2.5B: the paper gives the hidden size; 54 layers make 2.5 billion parameters."""

DEVICE = preset("rtx-3090")

BUDGET_BYTES = int(usable_on(DEVICE, Mesh(1, 1, NUM_GPUS, 0, torch.device("cpu"), None)))
"""What tensors may fill of an RTX 3090's memory."""

PAPER = {
    (4, 1): (6.81, 7.61),
    (4, 2): (6.84, 7.01),
    (8, 1): (6.39, 7.72),
    (8, 2): (6.64, 6.83),
    (8, 4): (6.21, 6.39),
}
"""Table III: (stages, microbatch) → samples per second, default and stage-aware."""


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of the model."""

    forecast: Forecast
    times: Sequence[SegmentTimes]

    def seconds(self, saved: frozenset[int]) -> float:
        """Of the simulated iteration."""
        layout = self.forecast.layout
        costs = pipeline_costs(layout.partition, self.times, saved)
        return simulate(self.forecast.recomputing(layout.schedule, saved), costs).makespan

    def peaks(self, saved: frozenset[int]) -> list[int]:
        """Bytes that every rank holds at the most."""
        ranks = self.forecast.ranks(self.forecast.layout.schedule, ActivationPolicy(saved))
        return [rank.peak.total_bytes for rank in ranks]

    def ratios(self, first: float) -> frozenset[int]:
        """The segments that the paper's formula keeps."""
        partition = self.forecast.layout.partition
        return first_of_stages(partition, paper_ratios(first, partition.num_stages))


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the paper's jobs."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def case_of(num_stages: int, microbatch: int, num_layers: int = LAYERS) -> Case:
    """Trace the model and lay it out over some stages, balanced by the same times."""
    config = GPT2Config(
        n_embd=HIDDEN, n_layer=num_layers, n_head=HEADS, n_positions=SEQUENCE, use_cache=False,
        loss_type="ForCausalLM", attn_implementation="eager",
    )  # fmt: skip
    with empty_weights():
        model = GPT2LMHeadModel(config)
    columns = {n: TensorMeta((microbatch, SEQUENCE), torch.int64) for n in ("input_ids", "labels")}
    graph = build_graph(GraphSource(model), columns, training=True)
    times = segment_costs(graph.segments, DEVICE)
    dp = NUM_GPUS // num_stages
    num_microbatches = GLOBAL_BATCH // (dp * microbatch)
    plans = StepPlans("shifted_critical_path", num_stages, num_microbatches)
    options = EngineOptions(
        num_microbatches=num_microbatches, optimizer=adam, tied_gradients="step",
        device_profile=DEVICE,
    )  # fmt: skip
    forecast = Forecast(
        model,
        Layout(graph, balance(times, num_stages, num_microbatches), plans),
        Mesh(dp, 1, num_stages, 0, torch.device("cpu"), None),
        None,
        options,
    )
    return Case(forecast, times)


def largest_first_ratio(case: Case, budget: int) -> float:
    """The largest α_1, in hundredths, with which every rank fits; negative where none does."""
    fits = -0.01
    low, high = 0, 100
    while low <= high:
        middle = (low + high) // 2
        if max(case.peaks(case.ratios(middle / 100))) <= budget:
            fits, low = middle / 100, middle + 1
        else:
            high = middle - 1
    return fits


def table_row(num_stages: int, microbatch: int, num_layers: int) -> dict[str, Any]:
    case = case_of(num_stages, microbatch, num_layers)
    default = case.forecast.saved
    row: dict[str, Any] = {"stages": num_stages, "microbatch": microbatch}
    paper = PAPER.get((num_stages, microbatch))
    row["paper, gain"] = round(paper[1] / paper[0], 2) if paper else "out of memory"
    peak = max(case.peaks(default))
    row["default, MiB"] = round(peak / 2**20)
    if peak > BUDGET_BYTES:
        return row | dict.fromkeys(("samples/s", "α_1", "formula, gain", "auto, MiB", "auto, gain"))
    base_s = case.seconds(default)
    row["samples/s"] = round(GLOBAL_BATCH / base_s, 2)
    row["α_1"] = largest_first_ratio(case, BUDGET_BYTES)
    row["formula, gain"] = round(base_s / case.seconds(case.ratios(row["α_1"])), 3)
    saved = fill(case)
    row["auto, MiB"] = round(max(case.peaks(saved)) / 2**20)
    row["auto, gain"] = round(base_s / case.seconds(saved), 3)
    return row


def fill(case: Case, budget: int = BUDGET_BYTES) -> frozenset[int]:
    forecast = case.forecast
    schedule = forecast.layout.schedule
    chosen = [
        forecast.fill_rank(rank, schedule, forecast.timed(case.times, DEVICE), budget, {})[0]
        for rank in range(forecast.mesh.pp)
    ]
    return frozenset().union(*chosen)


def figure_rows(case: Case) -> list[dict[str, Any]]:
    base_s = case.seconds(case.forecast.saved)
    rows = []
    for tenths in range(11):
        saved = case.ratios(tenths / 10)
        peaks = case.peaks(saved)
        rows.append(
            {
                "α_1": tenths / 10,
                "gain": round(base_s / case.seconds(saved), 3),
                "least, MiB": round(min(peaks) / 2**20),
                "mean, MiB": round(sum(peaks) / len(peaks) / 2**20),
                "most, MiB": round(max(peaks) / 2**20),
                "fits": max(peaks) <= BUDGET_BYTES,
            }
        )
    return rows


def budget_rows(case: Case) -> list[dict[str, Any]]:
    base_s = case.seconds(case.forecast.saved)
    rows = []
    for gibibytes in (10, 12, 14, 16, 18, 20):
        budget = gibibytes * 2**30
        first = largest_first_ratio(case, budget)
        auto = base_s / case.seconds(fill(case, budget))
        if first < 0:
            continue  # not even with everything but the last stage recomputed
        formula = base_s / case.seconds(case.ratios(first))
        rows.append(
            {
                "budget, GiB": gibibytes,
                "α_1": first,
                "formula, gain": round(formula, 3),
                "auto, gain": round(auto, 3),
                "auto over formula, %": round(100 * (auto / formula - 1), 1),
            }
        )
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    shown = [f"{stages}x{microbatch}" for stages in (4, 8) for microbatch in (1, 2, 4)]
    parser.add_argument("--rows", nargs="+", choices=shown, default=shown, help="of table III")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the table's model")
    parser.add_argument("--table-only", action="store_true", help="without the paper's figure 9b")
    args = parser.parse_args()
    keys = [tuple(map(int, key.split("x"))) for key in args.rows]
    tables = {"Table III": [table_row(*key, args.layers) for key in keys]}
    if not args.table_only:
        eight = case_of(8, 1)
        tables["Figure 9b: 8 stages, microbatches of 1"] = figure_rows(eight)
        tables["The same at other budgets"] = budget_rows(eight)
    report.show(tables, args.json)


if __name__ == "__main__":
    main()

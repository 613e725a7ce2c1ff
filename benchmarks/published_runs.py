"""Published training runs beside the price that Merak gives them, from data sheets alone.

    python -m benchmarks.published_runs [--sets S1,S2] [--row TEXT] [--suppose unfused|slow-network]

Every row of `data/published_runs.csv` is a model, a layout and the time of an iteration on A100 or
H100 GPUs, as its authors printed them. The model is built as an ordinary transformers model without
weights, and priced under that layout on the cluster that the source describes. What a source does
not print is chosen as its authors would: of microbatches, interleaving and recomputation, the
choice with the shortest step that fits the memory.

The runs had fused kernels. What else a framework had follows from the year, by the history of
Megatron-LM (`KernelChoice`), one rule for all rows: products of weight gradients that add to their
sums came in February 2022, reductions of gradients beside the backward in August 2023, flash
attention and collectives of tensor parallelism beside products (`--tp-comm-overlap`) in 2023.
S3 had the pipeline engine of DeepSpeed, which converts every gradient to float32 before it adds it
(`update_hp_grads` of its `deepspeed/runtime/bf16_optimizer.py`, as it was published in 2022). Their
selective recomputation is that of the attention's scores alone (arXiv 2205.05198, section 5), which
is what an attention operator without flash attention does; so rows with it save everything else.

`--suppose` prices the rows as if something were otherwise: kernels of one operator each, or an
eighth of the network. It asks what a difference could come from; the published table has none.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.tools.uncertainty import Error, print_uncertainty
from merak.graph.tensor_parallel.features import Vocabulary
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.memory.ledger import Category
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

TABLE = Path(__file__).parent / "data" / "published_runs.csv"
GIB = 2**30

DEVICES = {"A100-80GB": "a100-80gb", "H100-80GB": "h100-sxm"}
TARGETS = {"S1": 0.15, "S2": 0.10, "S3": 0.15, "S4": 0.15}
"""Mean errors of the times of each set that Merak is to stay within."""

YEARS = {"S1": 2021, "S2": 2022, "S3": 2021, "S4": 2024}
"""When the runs of each set were made, which says what its framework had."""

DEEPSPEED = frozenset({"S3"})
"""Sets whose pipelines and sums of gradients were DeepSpeed's."""


@dataclass(frozen=True)
class Row:
    """A published run. Fields that its source does not print are None."""

    set: str
    model: str
    device: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    dp: int
    tp: int
    pp: int
    batch: int
    chunks: int | None
    microbatch: int | None
    recompute: str | None
    sequence_parallel: bool | None
    seconds: float
    state_gib: float | None
    activations_gib: float | None

    @property
    def has_flash(self) -> bool:
        """Whether its framework had flash attention when it ran: Megatron-LM from 2023 on."""
        return YEARS[self.set] >= 2023

    @property
    def hides_reductions(self) -> bool:
        """Whether gradients were reduced beside the backward: in Megatron-LM from 2023 on."""
        return YEARS[self.set] >= 2023

    @property
    def converts_gradients(self) -> bool:
        """Whether gradients were copied to float32 before they were added: in DeepSpeed."""
        return self.set in DEEPSPEED

    @property
    def overlaps_products(self) -> bool:
        """Whether collectives of tp ran beside products: in Megatron-LM from 2023 on."""
        return YEARS[self.set] >= 2023

    @property
    def has_fused_sums(self) -> bool:
        """Whether products added to the sums of gradients: Megatron-LM from 2022 on."""
        return YEARS[self.set] >= 2022


def read_rows() -> list[Row]:
    """The table."""
    with TABLE.open() as file:
        lines = [line for line in file if not line.startswith("#")]
    return [_row(fields) for fields in csv.DictReader(lines)]


def _row(fields: dict[str, str]) -> Row:
    def number(name: str) -> int | None:
        return int(fields[name]) if fields[name] else None

    def gib(name: str) -> float | None:
        return float(fields[name]) if fields[name] else None

    sizes = {n: int(fields[n]) for n in ("layers", "hidden", "heads", "vocab", "seq")}
    degrees = {n: int(fields[n]) for n in ("dp", "tp", "pp", "batch")}
    return Row(
        set=fields["set"],
        model=fields["model"],
        device=fields["device"],
        **sizes,
        **degrees,
        chunks=number("chunks_per_rank"),
        microbatch=number("microbatch"),
        recompute=fields["recompute"] or None,
        sequence_parallel={"yes": True, "no": False}.get(fields["sequence_parallel"]),
        seconds=float(fields["seconds"]),
        state_gib=gib("weights_optimizer_gib"),
        activations_gib=gib("activations_gib"),
    )


def adam(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of all rows, one kernel as Apex has it."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)  # type: ignore[arg-type]


def workload_of(row: Row, recompute: str) -> Workload:
    """The model of a row, whose attention is one operator where its scores are not saved."""
    # Full recomputation computes scores again with the rest; they need none of their own.
    in_parts = recompute == "full" and not row.has_flash
    dropout = 0.0 if row.has_flash else 0.1
    config = GPT2Config(
        n_layer=row.layers,
        n_embd=row.hidden,
        n_head=row.heads,
        vocab_size=row.vocab,
        n_positions=row.seq,
        activation_function="gelu_pytorch_tanh",
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_implementation="eager" if in_parts else "sdpa",
        use_cache=False,
    )
    workload = example_workload(
        ModelSource(GPT2LMHeadModel, config, None),
        global_batch=row.batch,
        sequence=row.seq,
        dtype=torch.bfloat16,
        optimizer=adam,
        common=ParallelOptions(master_weights=True, tied_gradients="step", loss_chunk_bytes=0),
    )
    workload.features = {"transformer.wte.weight": Vocabulary()}
    workload.kernels = KernelChoice(
        recomputes_whole=True,
        fused=True,
        fused_sums=row.has_fused_sums,
        flash_attention=row.has_flash,
        hides_reductions=row.hides_reductions,
        overlaps_products=row.overlaps_products,
        converted_gradients=row.converts_gradients,
        copies_buckets=False,
    )
    return workload


def cluster_of(row: Row) -> Cluster:
    """Nodes of eight: A100s with eight adapters of HDR each (Selene), H100s with eight of NDR."""
    devices = row.dp * row.tp * row.pp
    size = min(devices, 8)
    return parse_cluster(f"{DEVICES[row.device]}:{size}x{devices // size}")


def candidates(row: Row) -> Iterator[tuple[str, Candidate]]:
    """Every layout that a row leaves open, with what its workload recomputes."""
    microbatches = [row.microbatch] if row.microbatch else [1, 2, 4]
    recomputes = [row.recompute] if row.recompute else ["selective", "full"]
    for recompute, microbatch in itertools.product(recomputes, microbatches):
        count, left = divmod(row.batch, row.dp * microbatch)
        if left:
            continue
        parallel = row.sequence_parallel
        if parallel is None:
            parallel = row.tp > 1
        for chunks in [row.chunks] if row.chunks else range(1, row.layers // row.pp + 1):
            layers, uneven = divmod(row.layers, row.pp * chunks)
            if uneven or not layers or (chunks > 1 and (row.pp == 1 or count % row.pp)):
                continue
            interleaved = chunks > 1
            yield (
                recompute,
                Candidate(
                    dp=row.dp,
                    tp=row.tp,
                    pp=row.pp,
                    microbatch=microbatch,
                    num_microbatches=count,
                    schedule="interleaved_1f1b" if interleaved else "1f1b",
                    schedule_options={"chunks": chunks} if interleaved else {},
                    recompute="full" if recompute == "full" else "off",
                    sequence_parallel=parallel and row.tp > 1,
                    zero=1 if row.has_flash and row.dp > 1 else 0,
                    partition=equal_layers(layers, row.pp * chunks),
                ),
            )


def equal_layers(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on every stage, of two segments each; the embedding first, the head last."""
    sizes = [2 * layers] * stages
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


@dataclass(frozen=True)
class Found:
    """The price of a row, and its memory as the sources count it, GiB: without temporaries."""

    price: Price
    state_gib: float
    activations_gib: float


def _supposed(row: Row, suppose: str | None) -> tuple[bool, Cluster]:
    """Whether kernels are fused, and the cluster."""
    cluster = cluster_of(row)
    if suppose == "slow-network":
        links = [replace(n.network, bytes_per_s=n.network.bytes_per_s / 8) for n in cluster.nodes]
        nodes = zip(cluster.nodes, links, strict=True)
        cluster = replace(cluster, nodes=tuple(replace(n, network=link) for n, link in nodes))
    return suppose != "unfused", cluster


def best(row: Row, suppose: str | None = None) -> Found:
    """The price of the row's layout, the shortest that fits where the source leaves a choice."""
    is_fused, cluster = _supposed(row, suppose)
    workloads: dict[str, Workload] = {}
    found = []
    for recompute, candidate in candidates(row):
        if recompute not in workloads and any(own.fits for own, _ in found):
            break  # what saves more fits
        if recompute not in workloads:
            workloads[recompute] = made = workload_of(row, recompute)
            made.kernels = replace(made.kernels, fused=is_fused)
        found.append((price(workloads[recompute], cluster, candidate), workloads[recompute]))
    fitting = [own for own in found if own[0].fits] or found
    chosen, workload = min(fitting, key=lambda own: own[0].step_s)
    ranks = memory_of(workload, cluster, chosen.candidate)
    states = [sum(s.parameters + s.gradients + s.optimizer for s in own.stages) for own in ranks]
    # The rank's peak may be at a moment when none are left; a stage's own peak never is.
    held = ranks[0].peak.by_category.get(Category.ACTIVATIONS, 0)
    activations = max(held, ranks[0].stages[0].activations)
    return Found(chosen, statistics.mean(states) / GIB, activations / GIB)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sets", default="S1,S2,S3,S4")
    parser.add_argument("--row", default="", help="rows whose model has this text alone")
    parser.add_argument("--suppose", choices=["unfused", "slow-network"])
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = arguments.sets.split(",")
    rows = [row for row in read_rows() if row.set in chosen and arguments.row in row.model]
    start = time.perf_counter()
    head = [
        "set",
        "model",
        "layout",
        "published s",
        "Merak s",
        "error",
        "compute/bubble/comm/update",
    ]
    head += ["published GiB", "Merak GiB", "error"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    errors: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    own_errors = []
    for row in rows:
        found = best(row, arguments.suppose)
        print(f"| {' | '.join(_cells(row, found, errors, memory))} |", flush=True)
        own_errors.append(_error(row, found.price))
        gc.collect()
    print()
    for name, own in errors.items():
        _summary(f"{name}, time", own, f"target: mean {TARGETS[name]:.0%}")
    for name, own in memory.items():
        _summary(f"{name}, memory", own, "target: 8%")
    print_uncertainty(own_errors)
    print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s")


def _cells(
    row: Row, found: Found, errors: dict[str, list[float]], memory: dict[str, list[float]]
) -> list[str]:
    """The cells of a row; its errors are added to those of its set."""
    own = found.price
    error = own.step_s / row.seconds - 1
    errors.setdefault(row.set, []).append(error)
    cells = [row.set, row.model, _layout(own.candidate, row), f"{row.seconds:.2f}"]
    cells += [f"{own.step_s:.2f}{'' if own.fits else ' (does not fit)'}", f"{error:+.1%}"]
    parts = [own.compute_s, own.bubble_s, own.exposed_communication_s, own.optimizer_s]
    cells.append("/".join(f"{part / own.step_s:.0%}" for part in parts))
    if row.state_gib is None:
        return [*cells, "", f"{max(own.peak_memory_bytes) / GIB:.1f} (peak)", ""]
    if row.activations_gib is None:
        cells += [f"{row.state_gib:.1f}", f"{found.state_gib:.1f}"]
        off = found.state_gib / row.state_gib - 1
    else:
        cells += [f"{row.state_gib:.1f} + {row.activations_gib:.1f}"]
        cells += [f"{found.state_gib:.1f} + {found.activations_gib:.1f}"]
        published = row.state_gib + row.activations_gib
        off = (found.state_gib + found.activations_gib) / published - 1
    memory.setdefault(row.set, []).append(off)
    return [*cells, f"{off:+.1%}"]


def _error(row: Row, own: Price) -> Error:
    """The error of a row's time, with the parts of its price."""
    parts = (own.compute_s, own.bubble_s, own.exposed_communication_s, own.optimizer_s)
    compute, bubble, communication, update = (part / own.step_s for part in parts)
    shares = (compute, bubble, communication, update)
    return Error(row.set, shares, own.step_s / row.seconds - 1, own.uncertainty)


def _layout(candidate: Candidate, row: Row) -> str:
    words = [f"{candidate.dp}×{candidate.tp}×{candidate.pp}", f"microbatch {candidate.microbatch}"]
    if candidate.schedule_options:
        words.append(f"{candidate.schedule_options['chunks']} chunks")
    selective = "selective" if candidate.recompute == "off" and not row.has_flash else "nothing"
    words.append(f"recompute {'full' if candidate.recompute == 'full' else selective}")
    return ", ".join([*words, *(["SP"] if candidate.sequence_parallel else [])])


def _summary(what: str, errors: Sequence[float], target: str) -> None:
    sizes = [abs(error) for error in errors]
    print(
        f"{what}: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}, "
        f"bias {statistics.mean(errors):+.1%} ({target})"
    )


if __name__ == "__main__":
    main()

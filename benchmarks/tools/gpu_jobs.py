"""What one device shows of larger jobs: copies beside computation, and one rank without others."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

import merak
from merak.engine.segments.copy_streams import CopyQueue, SyncCopies
from merak.plan.cluster.parse import parse_cluster
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.rehearse.rehearsal import Rehearsal, rehearse
from merak.zoo.batches.batch import example_columns
from merak.zoo.batches.columns import draw_batch
from merak.zoo.model_source import resolve_model
from merak.zoo.workload import example_workload
from tools.gpu_cases import TINY, Case, Repeated, built
from tools.gpu_pairs import synchronize
from tools.gpu_parts import AUTOCAST, adam, free, peak_of_step
from tools.models import Size

# ---- offloading ----

OFFLOADED = Size(2048, 6, 32, 32000, 1024, 2, 4)
"""A few layers, whose activations take longer to leave than the microbatches before the first."""

STEPS = 4

CHOICES: dict[str, tuple[str, bool]] = {
    "kept on the device": ("off", False),
    "offloaded": ("full", False),
    "offloaded, copies in turn": ("full", True),
}
"""What is offloaded, and whether its copies have nothing beside them."""


def offload(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Seconds of a step with offloaded activations, and how much of their copies is hidden."""
    merak.init(device=device)
    case = Case("llama", TINY if device == "cpu" else OFFLOADED, device)
    seconds: dict[str, float] = {}
    for name, (offloaded, in_turn) in CHOICES.items():
        row = {"activations": name}
        seconds[name], row["host memory, GB"] = offloaded_step(case, offloaded, in_turn)
        row["seconds of a step"] = f"{seconds[name]:.4g}"
        free(device)
        if in_turn:
            row["copies hidden"] = hidden(*seconds.values())
        yield row


def hidden(kept_s: float, offloaded_s: float, in_turn_s: float) -> str:
    """The share of the copies' time that computation hides, from the seconds of three steps."""
    copies_s = in_turn_s - kept_s
    if copies_s <= 0.02 * kept_s:
        return "none seen"
    return f"{min(1.0, max(0.0, (in_turn_s - offloaded_s) / copies_s)):.2f}"


def offloaded_step(case: Case, offloaded: str, in_turn: bool) -> tuple[float, str]:
    """The median seconds of a step, and gigabytes that it puts into host memory."""
    size, device = case.size, case.device
    count = size.accumulation
    tokens = Repeated(size).tokens[: size.batch * count]  # on the host, which sees what masks are
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    parallel = merak.parallelize(
        built(case), batch, num_microbatches=count, autocast=AUTOCAST,
        schedule="gpipe", offload_activations=offloaded,
    )  # fmt: skip
    parts = [stage.offload for stage in parallel.engine._state.stages.values()]
    copied = [0]
    for part in {part for part in parts if part is not None}:
        part._out = Counted(SyncCopies() if in_turn else part._out, copied)
        part._back = SyncCopies() if in_turn else part._back
    taken = []
    for _ in range(STEPS):
        copied[0] = 0
        started = time.perf_counter()
        parallel.step(batch)
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken[1:]), f"{copied[0] / 1e9:.3g}"


HOMES = ("off", "cpu", "cpu, delayed", "files")
"""Where the optimizer's states are: on the device, in host memory, or in a file; and whether its
steps are delayed by one, whose losses are others."""


def offload_optimizer(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Seconds and peak of a step by where the optimizer's states are, and the loss of the last."""
    merak.init(device=device)
    case = Case("llama", TINY if device == "cpu" else OFFLOADED, device)
    tokens = Repeated(case.size).tokens[: case.size.batch]
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    with tempfile.TemporaryDirectory() as folder:
        for home in HOMES:
            where, _, delayed = home.partition(", ")
            parallel = merak.parallelize(
                built(case), batch, autocast=AUTOCAST, optimizer=adam, max_grad_norm=1.0,
                offload_optimizer=folder if where == "files" else where,
                delay_optimizer_update=bool(delayed),
            )  # fmt: skip
            taken = []
            for _ in range(STEPS):
                started = time.perf_counter()
                loss = float(parallel.step(batch))
                synchronize(device)
                taken.append(time.perf_counter() - started)
            row = {"states": home, "seconds of a step": f"{median(taken[1:]):.4g}"}
            if device == "cuda":  # the CPU has both memories in one
                row["peak, GB"] = f"{peak_of_step(parallel, batch) / 1e9:.4g}"
            yield row | {"loss": f"{loss:.5g}"}
            del parallel
            free(device)


class Counted:
    """A queue of copies whose bytes are counted.

    Args:
        queue: makes them.
        copied: its first number grows by the bytes.
    """

    def __init__(self, queue: CopyQueue, copied: list[int]) -> None:
        self._queue, self._copied = queue, copied
        self.wait, self.drain = queue.wait, queue.drain

    def copy(self, pairs: Any, after: Any = (), is_ahead: bool = False) -> Any:
        """Begin copies, and count their bytes."""
        self._copied[0] += sum(source.nbytes for _, source in pairs)
        return self._queue.copy(pairs, after, is_ahead)


# ---- one rank of a job ----

CLUSTER = "h100:8"
PLAN = Candidate(tp=8, microbatch=1, num_microbatches=4, sequence_parallel=True)
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 128,
}  # fmt: skip


def rehearsed(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """One rank of an 8B on eight H100s, run alone, beside the price of the plan."""
    config, sequence = (SMALL, 16) if device == "cpu" else (LLAMA_8B, 4096)
    here = torch.device(device, *([torch.cuda.current_device()] if device == "cuda" else []))
    config = config | {"max_position_embeddings": sequence}
    source = resolve_model("LlamaForCausalLM", config)
    samples = PLAN.microbatch * PLAN.num_microbatches
    workload = example_workload(
        source, global_batch=samples, sequence=sequence, device=here, optimizer=adam,
        dtype=torch.bfloat16, common=ParallelOptions(master_weights=True),
    )  # fmt: skip
    columns = example_columns(source.model_class, source.config, batch=samples, sequence=sequence)
    batch = draw_batch(columns, seed=0)
    yield from rows_of(
        rehearse(workload, parse_cluster(CLUSTER), PLAN, 0, batch, device=here, steps=3)
    )


def rows_of(found: Rehearsal) -> Iterator[dict[str, Any]]:
    """Measured figures beside those of the plan."""

    def row(figure: str, measured: float, planned: float) -> dict[str, Any]:
        ratio = f"{measured / planned:.2f}" if planned else ""
        return {
            "figure": figure, "measured": f"{measured:.4g}", "planned": f"{planned:.4g}",
            "ratio": ratio,
        }  # fmt: skip

    yield row("step of the job, s", found.step_s, found.planned.step_s)
    yield row("optimizer's step, s", found.optimizer_s, found.planned.optimizer_s)
    for action in found.actions:
        seconds = action.measured_s + action.charged_s
        yield row(f"{action.kind} of stage {action.stage}, s", seconds, action.forecast_s)
    peak = found.memory.peak.total_bytes
    yield row("peak memory, GB", found.peak_bytes / 1e9, peak / 1e9)

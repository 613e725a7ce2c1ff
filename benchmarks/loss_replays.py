"""Milliseconds in which a loss that reads values runs again: behind a step, and while it is traced.

A `compute_loss` that reads values runs again on every rank for each microbatch of all replicas, on
fake tensors, and in a trace with some made-up values of what it reads. What its functions make of
tensors is remembered; beside it, each run makes all anew. The loss is that of a language model with
the metrics that fine-tuning logs.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any
from unittest import mock

import torch
from tools import report
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import merak
from merak.graph.trace.calls.host_reads import KnownResults
from merak.graph.trace.calls.loss_recorder import HostReadsRecorder
from merak.graph.trace.calls.replay import Replay


class Reads(merak.MerakTrainer):
    """Reads the accuracy, entropy, perplexity and lengths of each microbatch."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean of the labels' cross entropies."""
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].float(), inputs["labels"][:, 1:]
        each = torch.log_softmax(logits, -1)
        chosen = each.gather(-1, labels[..., None]).squeeze(-1)
        counts = (labels > 0).sum()
        loss = -chosen.sum() / counts
        own = vars(self).setdefault("seen", [])
        entropy = -(each.exp() * each).sum(-1)
        right = ((logits.argmax(-1) == labels) & (labels > 0)).sum()
        own.append((right / counts).item())
        own.append((entropy.sum() / counts).item())
        own.append(loss.exp().item())
        own.append(chosen.detach().sum(-1).tolist())
        own.append(counts.item())
        return (loss, outputs) if return_outputs else loss


Times = dict[str, list[float]]
"""Milliseconds of each run, with what is remembered and without, in turn."""


def train(steps: int) -> None:
    """Train a small model with such a loss for some steps."""
    torch.manual_seed(0)
    merak.init(device="cpu")
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256))
    data = [{"input_ids": (ids := torch.randint(1, 256, (32,))), "labels": ids} for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        args = merak.MerakArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=2, use_cpu=True,
            gradient_accumulation_steps=4, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        Reads(model=model, args=args, train_dataset=data).train()


def replays(steps: int) -> Times:
    """The loss again behind a step, for one microbatch."""
    found: Times = {"remembered": [], "anew": []}
    run = Replay.__call__

    def timed(replay: Replay, *args: Any) -> None:
        kind = "anew" if len(found["anew"]) < len(found["remembered"]) else "remembered"
        before = dict(replay.fakes)
        if kind == "anew":
            replay.fakes.clear()
        start = time.perf_counter()
        run(replay, *args)
        found[kind].append((time.perf_counter() - start) * 1e3)
        replay.fakes.update(before)

    with mock.patch.object(Replay, "__call__", timed):
        train(steps)
    return {kind: times[1:] for kind, times in found.items()}


def explorations(rounds: int) -> Times:
    """The loss with made-up values of what it reads, in one trace."""
    found: Times = {"remembered": [], "anew": []}
    explore = HostReadsRecorder._explore

    def forgetful(known: KnownResults) -> None:
        known.results = None

    def timed(recorder: HostReadsRecorder, *args: Any) -> None:
        start = time.perf_counter()
        explore(recorder, *args)
        found[kind].append((time.perf_counter() - start) * 1e3)

    with mock.patch.object(HostReadsRecorder, "_explore", timed):
        for _ in range(rounds):
            kind = "remembered"
            train(1)
            kind = "anew"
            with mock.patch.object(KnownResults, "__init__", forgetful):
                train(1)
    return found


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    request = parser.parse_args()
    measured = {
        "a loss again behind a step": replays(request.steps),
        "a loss again while it is traced": explorations(request.rounds),
    }
    tables = {}
    for name, found in measured.items():
        remembered, anew = (median(found[kind]) for kind in ("remembered", "anew"))
        row = {"remembered ms": remembered, "anew ms": anew, "ratio": remembered / anew}
        tables[name] = [row]
    report.show(tables, request.json)


if __name__ == "__main__":
    main()

"""Backwards of transformers' architectures: which are graphs, and whether bits are autograd's.

    python -m benchmarks.joint [NAME …]

Each architecture trains a step of two microbatches in its small version, once with the backwards
of its segments as graphs, once with autograd, on the same weights. Losses and gradients are
compared to the bit, and the memory of live storages is counted. Dropout stays on. Without names
it takes a sample, with `--all` every architecture of `make zoo`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

import merak
from benchmarks.tools import report
from benchmarks.tools.backwards import autograd_alone, obstacles
from merak.check import Case, CheckOptions, Layout
from merak.core.errors import MerakError
from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.data import signature
from merak.engine.build import build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request

SAMPLE = (
    "GPT2LMHeadModel LlamaForCausalLM BertForMaskedLM T5ForConditionalGeneration "
    "MixtralForCausalLM ViTForImageClassification BloomForCausalLM MambaForCausalLM "
    "DebertaV2ForMaskedLM SegformerForImageClassification"
).split()
MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class Step:
    """Losses, gradients by name, and the most bytes of live storages of a step."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]
    peak_bytes: int


def step(case: Case) -> tuple[Step, Counter[str]]:
    """A training step, and why autograd runs how many backwards ("" where it does not)."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = case.build().train()
    batches = [case.batch(number, 2) for number in range(MICROBATCHES)]
    columns = [signature(batch).columns for batch in batches]
    source = GraphSource(
        model=model, loss_fn=case.loss_fn, loss_columns=case.loss_columns, fixed=case.fixed
    )
    options = EngineOptions(num_microbatches=MICROBATCHES)
    engine = build_engine(source, columns[0], current_mesh(), options)
    known = [*engine.parameters.values(), *model.buffers()]
    with Storages(known) as storages:
        losses = engine.train_step(0, columns, batches, 1 / MICROBATCHES)
    gradients = {n: p.grad for n, p in engine.parameters.items() if p.grad is not None}
    return Step(losses, gradients, storages.peak_bytes), obstacles(engine)


def is_equal(ours: Step, theirs: Step) -> bool:
    """Whether two steps have the same losses and gradients, to the bit."""
    if ours.gradients.keys() != theirs.gradients.keys():
        return False
    pairs = [(ours.losses, theirs.losses)]
    pairs += [(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()]
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def row(name: str) -> dict[str, Any]:
    """Row of one architecture."""
    try:
        options = CheckOptions(num_microbatches=1, steps=1)
        case = small_version(Request(name), Layout(), options).job.case
        ours, why = step(case)
        with autograd_alone():
            theirs, _ = step(case)
    except MerakError as error:
        return {"architecture": name, "reason": f"{type(error).__name__}: {error}"[:100]}
    reasons = "; ".join(f"{count}: {reason}"[:100] for reason, count in why.items() if reason)
    return {
        "architecture": name,
        "segments": why.total(),
        "graphs": why[""],
        "equal bits": is_equal(ours, theirs),
        "peak, of autograd's": ours.peak_bytes / theirs.peak_bytes,
        "reason": reasons,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="every architecture of `make zoo`")
    options = parser.parse_args()
    names = options.names or SAMPLE
    if options.all:
        from tests.zoo.architectures import architectures

        names = list(architectures())
    transformers.logging.set_verbosity_error()
    merak.init(device="cpu")
    rows = [row(name) for name in names]
    report.show({"Backwards as graphs": rows}, options.json)
    wrong = [r["architecture"] for r in rows if r.get("equal bits") is False]
    if wrong:
        sys.exit(f"other bits than autograd's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

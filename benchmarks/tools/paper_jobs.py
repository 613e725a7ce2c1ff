"""Models, clusters and printed numbers of the two papers, and prices of their layouts."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from merak.core.errors import MerakError
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

DATA = Path(__file__).parents[1] / "data"
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
    """A cluster in `data`, or of a data sheet's devices."""
    return parse_cluster(str(DATA / name) if name.endswith(".yaml") else name)


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of Merak's jobs."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of Chimera's jobs."""
    return torch.optim.SGD(parameters, lr=1e-4)


@cache
def gpt(layers: int, hidden: int, heads: int) -> Workload:
    """A model of Merak's paper: sequences of 1,024."""
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=1024, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    workload = _workload(ModelSource(GPT2LMHeadModel, config, None), 1024, adam)
    workload.common = replace(workload.common, tied_gradients="step")
    return workload


@cache
def chimera_model(name: str) -> Workload:
    """A model of Chimera's paper, by its table 4: these sizes give the parameters it prints.

    Args:
        name: "GPT-2", "GPT-2 of 32 layers" as in figure 19, "Bert-48", or "Bert-48 of 512 tokens"
            as in figure 16.
    """
    if name.startswith("GPT-2"):
        config = GPT2Config(
            n_layer=32 if name.endswith("32 layers") else 64, n_embd=1280, n_head=20,
            n_positions=1024, use_cache=False,
            tie_word_embeddings=False, attn_implementation="eager",
        )  # fmt: skip
        return _workload(ModelSource(GPT2LMHeadModel, config, None), 632, sgd)
    config = BertConfig(
        num_hidden_layers=48, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    tokens = 512 if name.endswith("512 tokens") else 128
    return _workload(ModelSource(BertForPreTraining, config, None), tokens, sgd)


def _workload(source: ModelSource, sequence: int, optimizer: Any) -> Workload:
    # The samples of a step are those of the candidates that are priced.
    workload = example_workload(
        source, global_batch=1, sequence=sequence, dtype=torch.float32, optimizer=optimizer
    )
    # As the papers' systems do.
    whole = replace(workload.common, loss_chunk_bytes=0)
    return replace(workload, common=whole, kernels=KernelChoice(recomputes_whole=True))


def equal_layers(workload: Workload, num_stages: int) -> tuple[int, ...]:
    """As many layers on every stage, the embedding on the first and the head on the last."""
    layers = (len(workload.graph(1).segments) - 2) // 2
    sizes = [2 * (layers // num_stages + (i < layers % num_stages)) for i in range(num_stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


_CLOSE = 0.1


def is_near(ours: float, paper: float) -> bool:
    """Whether a figure is within a tenth of a paper's."""
    return abs(ours / paper - 1) <= _CLOSE


def compared(paper: float, ours: Mapping[str, float]) -> dict[str, Any]:
    """A line: the paper's figure, ours and their ratio, and the assumption that moves it most.

    Args:
        paper: its figure.
        ours: by assumption, "" for what is usually assumed; 0 for what does not fit.
    """
    usual = ours[""] / paper
    line = {"paper": paper, "Merak": round(ours[""], 2), "÷ paper": round(usual, 2)}
    others = {name: own / paper for name, own in ours.items() if name and own}
    if is_near(ours[""], paper) or not others:
        return {**line, "what moves it most": ""}
    name = min(others, key=lambda name: abs(others[name] - 1))
    moved = f"{name}: {ours[name]:.2f} ({others[name]:.2f} of the paper's)"
    if not is_near(ours[name], paper):
        moved = f"not explained; nearest, {moved}"
    return {**line, "what moves it most": moved}


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

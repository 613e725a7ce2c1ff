"""Small models and batches for the engine's tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.stage import Microbatch, Stage
from merak.engine.tensors_by_name import TensorDict
from merak.engine.weight_versions import LiveWeights
from merak.graph.ir.ir import ModelGraph
from merak.graph.program.program import Program, SegmentProgram, compile_program
from merak.graph.segment.build import GraphSource, build_graph

VOCABULARY, SEQUENCE = 40, 8


def gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Skips(nn.Module):
    """Blocks with a value that skips over all of them, a frozen layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        skipped = h = self.first(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        logits = self.last(self.frozen(h) * skipped)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def text_batch(size: int = 2, mask: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if mask:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -3:] = 0
    return batch


def number_batch(size: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return {"x": x, "y": torch.arange(size) % 3}


def metas(batch: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in batch.items()}


def graph_of(
    model: nn.Module, batch: Mapping[str, torch.Tensor], training: bool = True
) -> ModelGraph:
    return build_graph(GraphSource(model=model), metas(batch), training=training)


def program_of(graph: ModelGraph, bounds: list[int], own: list[int]) -> Program:
    return compile_program(graph, bounds, {stage: () for stage in own})


def microbatch_of(
    program: Program, batch: Mapping[str, torch.Tensor], buffers: TensorDict, scale: float = 1.0
) -> Microbatch:
    columns = {name: batch[name] for name in program.columns}
    batch_only = {}
    for prologue in (program.fixed, program.batch_only):
        batch_only |= _run(prologue, buffers, columns)
    return Microbatch(program, columns, batch_only, (3, "microbatch", 0), scale)


def _run(prologue: SegmentProgram, buffers: TensorDict, columns: TensorDict) -> TensorDict:
    segment = prologue.segment
    arguments = [buffers[n] for n in segment.buffers] + [columns[n] for n in segment.columns]
    return dict(zip(segment.outputs, prologue.function(*arguments), strict=True))


def stages_of(model: nn.Module, graph: ModelGraph, count: int, shared: set[str]) -> list[Stage]:
    parameters = dict(model.named_parameters())
    buffers = buffers_of(model, graph)
    device = torch.device("cpu")
    return [
        Stage(index, LiveWeights(parameters, shared), buffers, WeightGradients(), device)
        for index in range(count)
    ]


def buffers_of(model: nn.Module, graph: ModelGraph) -> TensorDict:
    return dict(model.named_buffers()) | dict(graph.constants)

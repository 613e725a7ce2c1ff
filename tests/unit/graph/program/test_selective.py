"""Kept operators of recomputed segments: the same gradients, without their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from merak.graph.ir.ir import ModelGraph
from merak.graph.program.program import ActivationChoices, Compiler, compile_program
from tests.tiers import one_in
from tests.unit.engine.models import (
    Skips,
    buffers_of,
    gpt2,
    graph_of,
    microbatch_of,
    number_batch,
    stages_of,
    text_batch,
)


class Kernels(TorchDispatchMode):
    """Counts the kernels that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(graph: ModelGraph, part: str = "") -> dict[int, set[str]]:
    """By segment, the operators whose target has a word in it."""
    return {
        segment.index: {
            n.name for n in segment.graph.nodes if n.op == "call_function" and part in str(n.target)
        }
        for segment in graph.segments
    }


def run(
    model: torch.nn.Module, batch: Any, part: str | None, joins: bool = True
) -> tuple[list[Any], Counter[str]]:
    """Gradients of a microbatch whose segments recompute, and the kernels of the second forward."""
    graph = graph_of(model, batch)
    choices = ActivationChoices(selective={} if part is None else operators(graph, part))
    compiler = Compiler(graph, joins=joins)
    program = compile_program(graph, [0, len(graph.segments)], {0: ()}, choices, compiler=compiler)
    (stage,) = stages_of(model, graph, 1, set())
    microbatch = microbatch_of(program, batch, buffers_of(model, graph))
    stage.forward(0, microbatch, {}, save=False)
    torch.manual_seed(99)  # whatever was drawn in between
    with Kernels() as kernels:
        stage.recompute(0, microbatch)
    assert program.loss is not None
    stage.backward(0, microbatch, {program.loss: torch.tensor(1.0)}, lambda _: None)
    return [p.grad for p in model.parameters() if p.grad is not None], kernels.counts


@one_in(3)
@pytest.mark.parametrize("part", ["", "addmm", "dropout", "attention", "layer_norm"])
def test_gradients_are_the_same_whatever_is_saved(part: str) -> None:
    """Also where operators are kept that draw random numbers, and others draw after them."""
    expected, _ = run(gpt2(dropout=0.5), text_batch(), None, joins=False)
    found, _ = run(gpt2(dropout=0.5), text_batch(), part)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def test_a_plain_model_keeps_any_operator() -> None:
    expected, _ = run(Skips(), number_batch(), None, joins=False)
    found, counts = run(Skips(), number_batch(), "")
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
    assert not counts["addmm"]


def test_kernels_of_saved_operators_run_once() -> None:
    _, without = run(gpt2(), text_batch(), None)
    _, kept = run(gpt2(), text_batch(), "attention")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert without[name] == 2 and kept[name] == 0
    # What its result was made of is made again only where the backward reads it.
    assert 0 < kept["addmm"] <= without["addmm"]


def test_what_only_later_segments_read_is_not_recomputed() -> None:
    _, by_autograd = run(gpt2(), text_batch(), None, joins=False)
    _, joined = run(gpt2(), text_batch(), None)
    # The last product of both attentions and of one MLP; that of the other enters the last norm.
    assert joined["addmm"] == by_autograd["addmm"] - 3

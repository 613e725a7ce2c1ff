"""Numbers of rows in chunks: losses and gradients are those of whole logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from merak.graph.chunked_rows import rows_in_chunks
from merak.graph.ir.operators import family
from merak.graph.joint.derive import derive
from merak.graph.program.codegen import as_run
from merak.graph.tensor_parallel.features import Vocabulary
from merak.ops.chunked_rows import chunked_rows
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity, assert_parity_on_tokens
from tests.unit.graph.test_chunked_loss import batch, tiny

ROWS = 3
"""Of a chunk, roughly."""


class Policy(nn.Module):
    """Log-probabilities of labels, entropies, and which labels are on top, with a temperature.

    Args:
        shifts: whether every token is scored by the one before.
        normalises: whether by operators that need all classes on one rank.
    """

    def __init__(self, shifts: bool = True, normalises: bool = False) -> None:
        super().__init__()
        self.model = tiny("Llama")
        self.shifts, self.normalises = shifts, normalises

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, target = self.model(input_ids).logits, labels
        if self.shifts:
            logits, target = logits[:, :-1], target[:, 1:]
        logits = logits.float() / 0.7
        counts = (target != -100).float()
        target = target.clamp_min(0)
        each = logits.log_softmax(-1)
        found = each.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        loss = (found * counts).sum() / counts.sum()
        entropy = -(each.exp() * each).sum(-1)
        if self.normalises:
            entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
        return -loss - 0.1 * (entropy * (logits.argmax(-1) == target)).sum()


@pytest.mark.parametrize(
    ("degree", "normalises"), [(1, False), (1, True), (2, False), slow(2, True)]
)
def test_training_is_that_of_whole_logits(degree: int, normalises: bool) -> None:
    shares_classes = degree > 1 and not normalises
    features = {"model.lm_head": Vocabulary()} if shares_classes else None
    chunk_bytes = 16 * ROWS * cases.VOCABULARY // (degree if shares_classes else 1)
    policy = Policy(normalises=normalises)
    assert_parity(policy, batch(True), features, degree, chunk_bytes=chunk_bytes)


def test_ranks_that_share_tokens_have_chunks_of_their_own() -> None:
    chunk_bytes = 8 * ROWS * cases.VOCABULARY
    assert_parity_on_tokens(Policy(shifts=False), batch(True), 2, chunk_bytes)


@pytest.mark.parametrize("normalises", [False, True])
def test_two_chunks_of_logits_are_enough(normalises: bool) -> None:
    chunk_bytes = 16 * ROWS * cases.VOCABULARY
    model = cases.traced(Policy(normalises=normalises), batch(True))
    graph = rows_in_chunks(model.segments[-1].graph, chunk_bytes)
    assert graph is not None
    placeholders = graph.find_nodes(op="placeholder")
    like = [torch.empty(n.meta["tensor"].shape, dtype=n.meta["tensor"].dtype) for n in placeholders]
    taken = {
        family(node.target): node.meta["taken_bytes"] - sum(node.meta["results"].values())
        for node in derive(as_run(graph), like, None).graph.nodes
        if "taken_bytes" in node.meta
    }
    assert taken.keys() == {"chunk_results", "chunk_results_gradients"}
    assert all(chunk_bytes / 4 < each <= 2 * chunk_bytes for each in taken.values()), taken


class Whole(nn.Module):
    """Log-probabilities, and a mean over all logits, which no chunk knows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("Llama")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids).logits
        each = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return logits.square().mean() - each.mean()


def test_what_is_read_whole_stays() -> None:
    graph = cases.traced(Whole(), batch(False)).segments[-1].graph
    assert rows_in_chunks(graph, 1) is None


class Distance(nn.Module):
    """The divergence of two models that do not train, times a number that does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = tiny("Llama").requires_grad_(False), tiny("Llama")
        self.other.requires_grad_(False).lm_head.weight.mul_(2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        one = self.one(input_ids).logits.log_softmax(-1)
        other = self.other(input_ids).logits.log_softmax(-1)
        return (one.exp() * (one - other)).sum(-1).mean() * self.scale


def test_a_head_that_reads_another_one_is_in_chunks() -> None:
    model, columns = Distance(), batch(False)
    graph = cases.traced(model, columns)
    last = graph.segments[-1]
    changed = rows_in_chunks(last.graph, 16 * ROWS * cases.VOCABULARY)
    assert changed is not None
    assert sum(node.target is chunked_rows for node in changed.nodes) == 1
    given = {**dict(model.named_parameters()), **cases.buffers(model, graph), **columns}
    rewritten = replace(graph, segments=(*graph.segments[:-1], replace(last, graph=changed)))
    found, expected = (cases.run_model(g, given, dict(given)) for g in (rewritten, graph))
    torch.testing.assert_close(found, expected)

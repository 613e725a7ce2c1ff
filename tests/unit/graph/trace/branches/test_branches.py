"""Layers dropped by chance: the traced model does what eager does with the same draws."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest
import torch
import transformers
from torch import nn

from merak.core.errors import TraceError
from merak.graph.ir.ir import ModelGraph
from merak.graph.trace.branches.branches import covering_array
from merak.graph.trace.branches.flags import is_condition
from tests.tiers import one_in
from tests.unit.graph import stages
from tests.unit.graph.dropped_layers import (
    DEPTH,
    PLAIN,
    WIDTH,
    Batch,
    Skipping,
    Stack,
    plain_batch,
    same_draws,
)
from tests.unit.graph.stages import Pipeline, built, gradients_of


def assert_like_eager(
    model: nn.Module, batch: Batch, seeds: range, graph: ModelGraph | None = None
) -> set[frozenset[str]]:
    """Compare losses and gradients; returns which parameters had none, seed by seed."""
    graph, without = graph or built(model, batch), set[frozenset[str]]()
    for seed in seeds:
        stages.assert_like_eager(graph, model, batch, seed=seed, draws=same_draws())
        without.add(frozenset(n for n, g in gradients_of(model).items() if g is None))
    return without


@one_in(3)
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_plain_models(kind: type[Stack]) -> None:
    graph = skipping() if kind is Skipping else None
    without = assert_like_eager(kind(), plain_batch(), range(12), graph)
    assert len(without) > 4, "the draws hardly differ"


@cache
def skipping() -> ModelGraph:
    """The graph of `Skipping`, which several tests run."""
    return built(Skipping(), plain_batch())


def transformer(kind: str) -> tuple[nn.Module, Batch]:
    """A small model of transformers whose layers are dropped half of the time."""
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(1))
    if kind == "Bart":
        bart = transformers.BartConfig(
            vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, max_position_embeddings=16, encoder_layerdrop=0.5,
            decoder_layerdrop=0.5, dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        return transformers.BartForConditionalGeneration(bart), {"input_ids": ids, "labels": ids}
    opt = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, layerdrop=0.5, dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(opt), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["Bart", "OPT"])
def test_models_of_transformers(kind: str) -> None:
    model, batch = transformer(kind)
    assert len(assert_like_eager(model.train(), batch, range(6))) > 2


def test_layers_are_cut_where_they_are_cut_without_choices() -> None:
    model, batch = transformer("Bart")
    graph = built(model, batch)
    model.config.encoder_layerdrop = model.config.decoder_layerdrop = 0.0
    model.model.encoder.layerdrop = model.model.decoder.layerdrop = 0.0
    plain = built(model, batch)
    assert [s.name for s in graph.segments] == [s.name for s in plain.segments]
    assert [len(b) for b in graph.boundaries()] == [len(b) for b in plain.boundaries()]


def test_how_often_layers_are_dropped() -> None:
    graph = skipping()
    choices = [n for n in graph.prologue.graph.nodes if is_condition(n)]
    assert len(choices) == DEPTH
    pipeline = Pipeline(graph, Skipping())
    told = []
    for seed in range(400):
        torch.manual_seed(seed)
        told.append(list(pipeline.derive(plain_batch()).values()))
    often = torch.tensor(told, dtype=torch.float64).mean(0)
    # Four standard deviations of 400 throws of a coin.
    assert ((often - 0.5).abs() < 0.1).all(), often
    kinds = {tuple(map(bool, row)) for row in told}
    assert len(kinds) == 2**DEPTH


class Certain(Stack):
    """Probabilities of 0 and 1 leave no choice."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) >= self.p:
                x = block(x)
        return x


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_probabilities(p: float) -> None:
    model = Certain(p)
    without = assert_like_eager(model, plain_batch(), range(1))
    graph = built(model, plain_batch())
    assert not any(is_condition(n) for s in graph.segments for n in s.graph.nodes)
    (names,) = without
    assert len(names) == (0 if p == 0 else len(list(model.blocks.parameters())))


def test_nothing_is_dropped_in_evaluation() -> None:
    model = Skipping()
    pipeline = Pipeline(built(model, plain_batch(), training=False), model.eval())
    for seed in range(3):
        torch.manual_seed(seed)
        expected = model(**plain_batch())["loss"]
        torch.testing.assert_close(pipeline.evaluate(plain_batch())["loss"], expected.detach())


class Normalised(Skipping):
    """Dropped layers have batch norms, whose statistics stay as they are then."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)


def test_a_dropped_layer_leaves_the_statistics_of_its_batch_norm_alone() -> None:
    model, like = Normalised(), Normalised()
    pipeline = Pipeline(built(model, plain_batch()), model)
    counts = set()
    for seed in range(8):
        torch.manual_seed(seed)
        pipeline.train(plain_batch())
        torch.manual_seed(seed)
        with same_draws():
            like(**plain_batch())
        for (name, found), (_, expected) in zip(
            model.named_buffers(), like.named_buffers(), strict=True
        ):
            torch.testing.assert_close(found, expected, msg=name)
        counts.add(tuple(int(block.norm.num_batches_tracked) for block in model.blocks))
    assert len({row[0] - row[-1] for row in counts}) > 1, "the draws hardly differ"
    assert_like_eager(Normalised(), plain_batch(), range(4))


class Remembering(Stack):
    """A layer does something else where the one before did not run."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        ran = True
        for block in self.blocks:
            y = block(x) if ran else block(2 * x)
            ran = bool(torch.rand(()) < 0.5)
            x = y if ran else x
        return x


class Replacing(Stack):
    """What does not run is replaced by something that is computed."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if torch.rand(()) < 0.5 else torch.tanh(x)
        return x


class InPlace(Stack):
    """A dropped layer writes into what passes it."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x += block.branch(x)
        return x


class Learnt(Stack):
    """A parameter has a part in the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Parameter(torch.tensor(0.5))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if torch.rand(()) < self.keep else x
        return x


class Nested(Stack):
    """How many choices there are hangs on a choice."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5 and torch.rand(()) < 0.5:
                x = block(x)
        return x


class Counting(Stack):
    """The probability hangs on a buffer that forward writes."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0.0))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for block in self.blocks:
            x = block(x) if torch.rand(()) < 1 / self.steps else x
        return x


REFUSED = {
    Counting: "by something that the model itself computes or writes",
    Remembering: "where a random number decides what runs next",
    Replacing: "is computed in its place|where a random number decides",
    InPlace: "writes in place into what a layer",
    Learnt: "by the parameter keep",
    Nested: "change how many more it evaluates",
}


@one_in(3)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused(kind: type[Stack]) -> None:
    with pytest.raises(TraceError, match=REFUSED[kind]):
        built(kind(), plain_batch())


@one_in(4)
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 11, 24])
def test_every_two_choices_are_seen_in_all_ways(num: int) -> None:
    rows = [frozenset[int](), *covering_array(num)]
    for pair in combinations(range(num), 2):
        seen = {tuple(i in row for i in pair) for row in rows}
        assert seen == set(product((False, True), repeat=2))
    assert all(any(i in row for row in rows) for i in range(num))
    assert len(rows) <= 9

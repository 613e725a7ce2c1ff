"""Packed sequences in a trace: as eager has them, whatever the lengths of a batch are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from merak.core.errors import TraceError, TrainingError
from tests.unit.graph.stages import Pipeline, assert_like_eager, built

WORDS, WIDTH, LENGTH, SAMPLES = 20, 6, 5, 4
Batch = dict[str, torch.Tensor]


class Tagger(nn.Module):
    """Sequences of words, packed in the model's own forward."""

    recurrent: Any = nn.LSTM
    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = self.recurrent(
            WIDTH, WIDTH, 2, batch_first=self.batch_first, bidirectional=True
        )
        self.tags = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.words(x if self.batch_first else x.t())
        packed = pack_padded_sequence(
            h, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False
        )
        packed, last = self.layer(packed)
        return self.loss(packed, last[0] if isinstance(last, tuple) else last, y)

    def loss(self, packed: PackedSequence, last: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, _ = pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)
        loss = functional.cross_entropy(self.tags(h).flatten(0, 1), y.flatten())
        return loss + last[-1].square().mean()


class Gated(Tagger):
    recurrent = nn.GRU
    batch_first = False


class Plain(Tagger):
    """One layer behind another, with dropout of the packed rows between them."""

    recurrent = nn.RNN

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.RNN(2 * WIDTH, WIDTH, nonlinearity="relu", batch_first=True)
        self.tags = nn.Linear(WIDTH, 3)

    def loss(self, packed: PackedSequence, last: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dropped = functional.dropout(packed.data, 0.0)
        packed, last = self.second(PackedSequence(dropped, *packed[1:]))
        h, counted = pad_packed_sequence(packed, padding_value=0.5)
        score = functional.cross_entropy(self.tags(h).transpose(0, 1).flatten(0, 1), y.flatten())
        return score + last.square().mean() / counted.sum()


class Counting(Tagger):
    """The mean of packed rows is one of as many as there are."""

    def loss(self, packed: PackedSequence, last: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return packed.data.square().mean()


def batch_of(seed: int, longest: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (SAMPLES,), generator=generator)
    lengths[seed % SAMPLES] = longest
    x = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    y = torch.randint(3, (SAMPLES, LENGTH), generator=generator)
    outside = torch.arange(LENGTH) >= lengths[:, None]
    return {"x": x, "lengths": lengths, "y": y.masked_fill(outside, -100)}


@pytest.mark.parametrize("kind", [Tagger, Gated, Plain], ids=lambda kind: kind.__name__)
def test_as_eager(kind: type[Tagger]) -> None:
    """One trace for batches with other lengths."""
    model = kind()
    graph = built(model, batch_of(0))
    for seed in range(3):
        assert_like_eager(graph, model, batch_of(seed))


def test_sequences_that_are_all_shorter() -> None:
    """Where the length is given they may be; else sizes would change."""
    model = Tagger()
    batch = batch_of(1, longest=3)
    loss = Pipeline(built(model, batch_of(0)), model).train(batch)
    torch.testing.assert_close(loss, model(**batch).detach())
    model = Plain()
    pipeline = Pipeline(built(model, batch_of(0)), model)
    with pytest.raises(TrainingError, match=r"gives 3 times .* give it total_length=5"):
        pipeline.train(batch)


def test_rows_are_not_counted() -> None:
    with pytest.raises(TraceError, match="square of the data of a packed sequence"):
        built(Counting(), batch_of(0))

"""Layers of which only some outputs are read: split or refused with a sentence, never a raw error.

Each is checked against one process, every parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph
from merak.graph.sub_pipelining.sub_microbatch import SampleDims, split_segment
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.search.auto_shard import limits_of
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from tests.versions import exported_since

BATCH, WIDTH, OUTPUTS = 4, 8, 24
Between = Callable[["Partly", Tensor], Tensor]


class TwoHeads(nn.Module):
    """A module with two results, of which nobody may read one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(OUTPUTS, WIDTH), nn.Linear(OUTPUTS, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x)), self.other(x)


class Partly(nn.Module):
    """stem → x + down(what is read of up(x)) → loss."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between
        self.stem, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.heads = TwoHeads()
        self.lstm = nn.LSTM(OUTPUTS, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(OUTPUTS, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (x + self.down(self.between(self, self.up(x)))).square().mean()


CASES: Mapping[str, Between] = {
    "one of three chunks": lambda _, y: y.chunk(3, -1)[1],
    "two of three chunks": lambda _, y: y.chunk(3, -1)[0] * y.chunk(3, -1)[2],
    "the first third": lambda _, y: y[..., :8],
    "the last third": lambda _, y: y.narrow(-1, 16, 8),
    "from an odd place": lambda _, y: y[..., 5:13],
    "every third": lambda _, y: y[..., ::3],
    "a small part": lambda _, y: y.split([8, 12, 4], -1)[0],
    "a small last part": lambda _, y: y.split([15, 1, 8], -1)[2],
    "a large part": lambda _, y: y.split([8, 12, 4], -1)[1][..., :8],
    "small parts beside a large one": lambda _, y: y.split([8, 8, 8], -1)[0] * y[..., 2:10],
    "one of each group": lambda _, y: y.unflatten(-1, (8, 3))[..., 1],
    "one group": lambda _, y: y.unflatten(-1, (3, 8)).unbind(-2)[1],
    "some columns": lambda _, y: y.index_select(-1, torch.arange(0, 24, 3)),
    "listed columns": lambda _, y: y[..., [1, 4, 6, 9, 11, 17, 20, 23]],
    "topk's values": lambda _, y: y.topk(8, -1)[0],
    "topk's indices": lambda _, y: y[..., :8] * y.topk(8, -1)[1],
    "max's values": lambda _, y: y.unflatten(-1, (8, 3)).max(-1)[0],
    "max's indices": lambda _, y: y[..., 8:16] * y.unflatten(-1, (8, 3)).max(-1)[1],
    "sorted": lambda _, y: y.sort(-1)[0][..., :8],
    "norm and its statistics": lambda _, y: torch.native_layer_norm(y, (24,), None, None, 1e-5)[0][
        ..., :8
    ],
    "mean of var_mean": lambda _, y: torch.var_mean(y.unflatten(-1, (8, 3)), -1)[1],
    "one of two results": lambda m, y: m.heads(y)[0],
    "the outputs of an LSTM": lambda m, y: m.lstm(y)[0],
    "the last state of an LSTM": lambda m, y: m.lstm(y)[1][0][-1][:, None],
    "attention without its weights": lambda m, y: m.attention(y, y, y)[0][..., :8],
    "a gate that is not read": lambda _, y: functional.glu(y[..., :16], -1),
}

MARKS = {"the last state of an LSTM": exported_since(2, 13)}  # with its right shape


def columns() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 6, WIDTH, generator=torch.Generator().manual_seed(1))}


def traced(name: str) -> tuple[nn.Module, ModelGraph]:
    torch.manual_seed(0)
    model = Partly(CASES[name]).train()
    return model, cases.traced(model, columns())


@one_in(5)
@pytest.mark.parametrize("name", [pytest.param(one, marks=MARKS.get(one, ())) for one in CASES])
def test_what_is_read_is_what_one_process_reads(name: str) -> None:
    model, graph = traced(name)
    for sequence in (False, True):
        assert_parity(model, columns(), None, 2, sequence=sequence)
    for degree in (3, 4, 5, 7):
        try:
            tensor_parallel(graph, None, degree)
        except ShardError as error:
            assert "can split nothing of this model" in str(error)
    assert limits_of(graph)["up.weight"] >= 1
    for segment in graph.segments:
        try:
            split_segment(segment, SampleDims(BATCH))
        except ShardError as error:
            assert str(error).endswith((".", "samples"))


def test_the_pieces_of_a_part_that_alone_is_read() -> None:
    assert limits_of(traced("the first third")[1])["up.weight"] == 8
    assert limits_of(traced("one of three chunks")[1])["up.weight"] == 8

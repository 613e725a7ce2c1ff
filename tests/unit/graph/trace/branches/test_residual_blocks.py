"""Residual blocks that are dropped by chance: what is found, scaled and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.graph.trace.branches.residual_blocks import (
    KEEP,
    OWN_NUMBER,
    Stacks,
    add_buffers,
    find_stacks,
    keeping_at_random,
)
from tests.unit.graph.dropped_layers import DEPTH, Block, Skipping, Stack

CPU = torch.device("cpu")


class Blocks(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Own(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.3


class Norms(Block):
    """A block that normalises the sum, and returns a second tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.down(x.repeat(1, 2))), x.sum()


class Alone(Block):
    """A block without a residual stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(x)


class Nested(Block):
    """A block with a list of its own, two sums, and its result in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        x = self.parts[0].branch(hidden_states) + hidden_states
        return x.add(self.parts[1].branch(x)), None


def test_stacks_are_the_outer_lists_of_blocks_of_one_class() -> None:
    names = tuple(f"blocks.{i}" for i in range(DEPTH))
    assert find_stacks(Blocks()) == Stacks(blocks=(names,))
    own = nn.Module()
    own.layers = nn.ModuleList(Nested() for _ in range(3))
    assert find_stacks(own) == Stacks(blocks=(("layers.0", "layers.1", "layers.2"),))


def test_a_model_that_drops_layers_itself_is_left_to_do_so() -> None:
    model = Own()
    stacks = find_stacks(model)
    assert stacks == Stacks(droppers=("",))
    add_buffers(model, stacks, CPU)
    assert model.get_buffer(OWN_NUMBER) == 0.0 and OWN_NUMBER not in model.state_dict()
    assert find_stacks(model) == stacks  # as it is asked for a second time


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(TraceError, match=r"Sequential has no nn.ModuleList of several blocks"):
        find_stacks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def called(kind: type[nn.Module], keep: float) -> tuple[Any, Any, torch.Tensor]:
    """A block's result where it may be dropped, and without."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(kind() for _ in range(2))
    stacks = find_stacks(model)
    add_buffers(model, stacks, CPU)
    assert not set(model.state_dict()) & {f"layers.0.{KEEP}"}
    block: Any = model.layers[0]
    block.get_buffer(KEEP).fill_(keep)
    x = torch.randn(3, 8)
    before = copy.copy(vars(block))
    with keeping_at_random(model, stacks):
        found = block(x)
    assert vars(block).keys() == before.keys()
    return found, block(x), x


def test_what_a_kept_block_adds_is_divided_by_its_probability() -> None:
    found, plain, x = called(Block, 1 - 1e-7)
    torch.testing.assert_close(found, plain)
    found, plain, x = called(Block, 4.0)  # which no number is above
    torch.testing.assert_close(found, x + (plain - x) / 4)
    (found, none), (plain, _), x = called(Nested, 1.0)
    assert none is None
    torch.testing.assert_close(found, plain)


def test_a_dropped_sublayer_leaves_the_stream_as_it_is() -> None:
    found, _, x = called(Block, -1.0)
    assert found is x
    (found, none), _, x = called(Nested, -1.0)
    assert found is x and none is None
    (found, total), _, x = called(Norms, -1.0)  # what is returned beside it is computed
    torch.testing.assert_close(found, nn.functional.layer_norm(x, (8,)))
    assert total == x.sum()


@pytest.mark.parametrize("keep", [1.0, -1.0])
def test_other_blocks_are_refused(keep: float) -> None:
    with pytest.raises(TraceError, match=r"layers.0 is not its input plus .* or layer_keep=1"):
        called(Alone, keep)

"""`torch.vmap` in a trace: operators on whole tensors, with the values of eager code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.errors import TraceError
from tests.unit.graph.stages import assert_like_eager, built

WIDTH, TOKENS, SAMPLES = 8, 6, 4


class Attention(nn.Module):
    """Attends behind a mask of its subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, is_token: torch.Tensor) -> dict[str, torch.Tensor]:
        query, key, value = self.mix(x).chunk(3, -1)
        mask = self.mask(is_token)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask)
        return {"loss": self.head(mixed).square().mean()}

    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Nested(Attention):
    """One call in another, which reads a column besides its arguments."""

    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        def is_read(sample: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            known = is_token[sample[None], key[None]][0]
            return ((query - key).abs() < 3) & (known | (query == key))

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            is_read = torch.vmap(is_read, in_dims=dims)
        places = torch.arange(TOKENS)
        return is_read(torch.arange(len(is_token)), places, places)


class Keyworded(Attention):
    """Arguments by name, a tree of results, and another dim of the result."""

    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        def both(query: torch.Tensor, *, key: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"after": query >= key, "same": query == key}

        places = torch.arange(TOKENS)
        found = torch.vmap(lambda key: torch.vmap(both, in_dims=(0,))(places, key=key), out_dims=1)(
            places
        )
        return (found["after"] & is_token[:, None]) | found["same"]


class WithoutGradients(Attention):
    """Reads what has a gradient, where none is taken."""

    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            size = torch.vmap(lambda row: (row * self.mix.weight[:TOKENS, :TOKENS]).sum(-1))
            return size(torch.eye(TOKENS)) + is_token.float()[:, None]


class Differentiated(Attention):
    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        size = torch.vmap(lambda row: (row * self.mix.weight[:TOKENS, :TOKENS]).sum(-1))
        return size(torch.eye(TOKENS)) + is_token.float()[:, None]


class Drawn(Attention):
    def mask(self, is_token: torch.Tensor) -> torch.Tensor:
        drawn = torch.vmap(lambda place: torch.rand(()) < place, randomness="different")
        return drawn(torch.arange(TOKENS)) | is_token[:, None]


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    known = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=drawn)
    return {
        "x": torch.randn(SAMPLES, TOKENS, WIDTH, generator=drawn),
        "is_token": torch.arange(TOKENS) < known,
    }


@pytest.mark.parametrize("kind", [Nested, Keyworded, WithoutGradients])
def test_as_eager(kind: type[Attention]) -> None:
    model = kind()
    graph = built(model, batch_of(0))
    nodes = [node for segment in graph.segments for node in segment.graph.nodes]
    assert not any("opaque" in str(n.target) or "vmap" in str(n.target) for n in nodes)
    for seed in range(2):
        assert_like_eager(graph, model, batch_of(seed))


@pytest.mark.parametrize("kind", [Differentiated, Drawn])
def test_refused(kind: type[Attention]) -> None:
    with pytest.raises(TraceError, match=r"test_vmap\.py:\d+: torch\.vmap runs there"):
        built(kind(), batch_of(0))

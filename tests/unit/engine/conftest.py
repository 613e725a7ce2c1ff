"""What tests of the engine share: traces, and a mesh of one rank."""

from collections.abc import Iterator

import pytest
import torch

import merak
from merak.core import mesh
from tests import shared_cache


@pytest.fixture(autouse=True)
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces that these tests need: none of the tests is about how a trace is made."""
    shared_cache.share(monkeypatch.setattr)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A mesh of this process alone, on the CPU, and a seed."""
    mesh.reset()
    merak.init(device="cpu")
    torch.manual_seed(0)
    yield
    mesh.reset()

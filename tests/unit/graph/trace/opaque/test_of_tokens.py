"""Inputs of a module that may be a loop over experts, of another number of tokens."""

from __future__ import annotations

import pytest
import torch

from merak.graph.trace.opaque.experts.loop import NotALoopError, _of_tokens


def test_a_number_has_no_tokens() -> None:
    assert _of_tokens(torch.zeros(4, 3), 4, 2).shape == (2, 3)
    with pytest.raises(NotALoopError):
        _of_tokens(torch.tensor(1.0), 4, 2)

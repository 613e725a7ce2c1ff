from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import MaskedLMOutput

from merak.graph.trace.calls.outputs import named_outputs, nested

a, b, c, loss = torch.ones(2), torch.zeros(2, 3), torch.ones(1), torch.tensor(1.0)

RESULTS: list[tuple[Any, tuple[str, ...]]] = [
    (loss, ("loss",)),
    (a, ("output",)),
    ((loss, a), ("loss", "output1")),
    ((a, loss), ("output0", "output1")),
    ((a, (b, (c, a)), {"x": b}), (
        "output0", "output1.output0", "output1.output1.output0", "output1.output1.output1",
        "output2.x",
    )),
    ({"loss": loss, "parts": (loss, a), "x": None}, ("loss", "parts.output0", "parts.output1")),
    ({"eval.loss": loss, "eval": {"scores.best": a}}, (r"eval\.loss", r"eval.scores\.best")),
    (MaskedLMOutput(loss=loss, logits=b, hidden_states=(a, c)), (
        "loss", "logits", "hidden_states.output0", "hidden_states.output1",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("result", "names"), RESULTS)
def test_tensors_are_named_by_where_they_are(result: Any, names: tuple[str, ...]) -> None:
    assert tuple(dict(named_outputs(result))) == names


@pytest.mark.parametrize(("result", "names"), RESULTS)
def test_nesting_gives_back_what_the_model_returned(result: Any, names: tuple[str, ...]) -> None:
    found = nested(dict(named_outputs(result)))
    if isinstance(result, dict):
        assert found == {name: value for name, value in result.items() if value is not None}
    else:
        assert tuple(found.values()) == (result if isinstance(result, tuple) else (result,))


def test_a_tensor_that_is_left_out_leaves_the_others_in_their_tuple() -> None:
    assert nested({"hidden_states.output1": 3, "logits": 4}) == {"hidden_states": (3,), "logits": 4}
    assert nested({}) == {}

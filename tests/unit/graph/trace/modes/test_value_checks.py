"""Checks of numbers in a model's code."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.modes.value_checks import passing_value
from merak.graph.trace.trace import trace
from tests.tiers import one_in
from tests.versions import exported_since

COLUMNS = {"x": TensorMeta((2, 4), torch.float32)}


@one_in(3)
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("if x.max() > 3:\n    raise ValueError", False),
        ("if not x.all():\n    raise ValueError", True),
        ("if y is not None and not (x == 1).all():\n    z = 1\n    raise ValueError", True),
        ("if x.all():\n    y = 1\nelse:\n    raise ValueError", True),
        ("if x.any():\n    logger.warning('odd')", False),
        ("assert x.any() or y.any()", True),
        ("assert not x.any()", False),
        ("if x.any() and not y.any():\n    raise ValueError", None),
        ("if x.any():\n    y = 1", None),
        ("if x.any():\n    logger.warning('odd')\n    y = 1", None),
        ("while x.any():\n    raise ValueError", None),
    ],
)
def test_what_lets_a_check_pass(code: str, answer: bool | None) -> None:
    assert passing_value(ast.parse(textwrap.dedent(code)), 1) is answer


class Checked(nn.Module):
    """Checks its batch in several ways before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x is not None and x.max() >= 100:
            raise ValueError("too large")
        assert not torch.isnan(x).any().item(), "not a number"
        if not (
            torch.isfinite(x).all()  # on a line of its own
        ):
            raise ValueError("infinite")
        return {"loss": self.layer(x).sum()}


class Chooses(Checked):
    """Computes something else for large numbers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        if y.max() >= 100:
            y = y / 100
        return {"loss": y.sum()}


def test_checks_are_taken_to_pass_and_told(caplog: pytest.LogCaptureFixture) -> None:
    traced = trace(Checked(), COLUMNS)
    operators = {str(n.target) for n in traced.graph.nodes if n.op == "call_function"}
    assert operators == {"aten.linear.default", "aten.sum.default"}
    said = [
        r.getMessage() for r in caplog.records if r.name == "merak.graph.trace.modes.value_checks"
    ]
    assert len(said) == 3
    assert "test_value_checks.py" in said[0] and "x.max() >= 100" in said[0]


def test_a_choice_by_numbers_is_still_refused() -> None:
    with pytest.raises(TraceError, match=r"cannot be traced at .*test_value_checks\.py:.*y\.max"):
        trace(Chooses(), COLUMNS)


class Distributed(Checked):
    """Uses a distribution, which checks its arguments in code of torch."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen = torch.distributions.Categorical(logits=self.layer(x))
        return {"loss": -chosen.entropy().mean()}


def test_checks_of_distributions_are_taken_to_pass(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile switches these checks off for the rest of a process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    trace(Distributed(), COLUMNS)
    (said,) = [
        r.getMessage() for r in caplog.records if r.name == "merak.graph.trace.modes.value_checks"
    ]
    assert "distributions/distribution.py:" in said and "_is_all_true(valid)" in said


class Spread(Checked):
    """Has a loss that checks its arguments in a function of torch, and a check of one number."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.abs().max().item() > 100:
            raise ValueError("too large")
        y = self.layer(x)
        return {"loss": nn.functional.gaussian_nll_loss(y, x, nn.functional.softplus(y))}


@exported_since(2, 13)
def test_checks_in_functions_of_torch_are_taken_to_pass(caplog: pytest.LogCaptureFixture) -> None:
    traced = trace(Spread(), COLUMNS)
    assert not any("item" in str(node.target) for node in traced.graph.nodes)
    said = [
        r.getMessage() for r in caplog.records if r.name == "merak.graph.trace.modes.value_checks"
    ]
    assert any("torch.any(var < 0)" in one for one in said)
    assert any("x.abs().max().item() > 100" in one for one in said)

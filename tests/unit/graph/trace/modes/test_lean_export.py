"""What a trace leaves out is not missed: the lines of operators are known, and graphs still run."""

import inspect

import pytest
import torch
from torch import fx, nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.modes.lean_export import lean_export
from merak.graph.trace.trace import trace


class TwoLines(nn.Module):
    """One operator on each line."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        doubled = x * 2
        return {"loss": doubled.sum()}


def test_every_operator_has_its_line() -> None:
    lines, first = inspect.getsourcelines(TwoLines.forward)
    wanted = [n for n, line in enumerate(lines, first) if "x * 2" in line or ".sum()" in line]
    traced = trace(TwoLines(), {"x": TensorMeta((2, 4), torch.float32)})
    found = [n.meta["source"] for n in traced.graph.nodes if n.op == "call_function"]
    assert found == [f"{__file__}:{number}" for number in wanted]


def test_no_graph_is_compiled_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    python_code = fx.Graph.python_code

    def counted(self: fx.Graph, *args: object, **kwargs: object) -> object:
        compiled.append(self)
        return python_code(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    trace(TwoLines(), {"x": TensorMeta((2, 4), torch.float32)})
    assert not compiled


def test_a_graph_that_runs_is_compiled_then() -> None:
    with lean_export():
        module = fx.symbolic_trace(nn.ReLU())
        forward = module.forward
    x = torch.tensor([-1.0, 2.0])
    assert [forward(x).tolist() for _ in range(2)] == [[0.0, 2.0]] * 2
    (operator,) = (n for n in module.graph.nodes if n.op == "call_function")
    operator.target, operator.kwargs = torch.neg, {}
    module.recompile()
    assert module(x).tolist() == [1.0, -2.0]

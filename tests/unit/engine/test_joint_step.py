"""Steps whose backwards are graphs: which segments, and what a step calls."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from merak.core import mesh
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.engine import Engine
from merak.graph.joint.segment import Functions, JointSegment
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.schedule.interpreter import StepInterpreter
from tests.unit.engine.models import gpt2, text_batch

pytestmark = pytest.mark.usefixtures("one_rank")


def _engine(model: nn.Module, **options: Any) -> Engine:
    columns = signature(text_batch()).columns
    chosen = EngineOptions(**{"num_microbatches": 1, **options})
    return build_engine(GraphSource(model=model), columns, mesh.current_mesh(), chosen)


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _python_calls(step: Callable[[], Any]) -> int:
    """Calls of Python functions inside a step."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def test_a_head_in_chunks_trains_as_one_that_makes_all_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, found = text_batch(), []
    num_rows: list[int] = []  # of which logits are made
    linear = functional.linear

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        num_rows.append(0 if isinstance(x, FakeTensor) else len(x))
        return linear(x, *args)

    monkeypatch.setattr("merak.ops.chunked_loss.functional.linear", counted)
    for chunk_bytes, passes, count, options in (
        (0, 0, 1, {}),
        (2**10, 1, 1, {}),
        (2**10, 2, 1, {"recompute": "full"}),
        (2**10, 2, 2, {"schedule": "gpipe"}),  # whose gradients of the head would all wait
    ):
        torch.manual_seed(0)
        engine = _engine(gpt2(), loss_chunk_bytes=chunk_bytes, num_microbatches=count, **options)
        num_rows.clear()
        columns = [signature(batch).columns] * count
        loss = engine.train_step(0, columns, [batch] * count, 1 / count).sum()
        assert sum(num_rows) == passes * count * (batch["labels"].numel() - len(batch["labels"]))
        programs = [p for s in engine._state.base.stages.values() for p in s.segments]
        assert not any(p.joint is None or p.joint.obstacle for p in programs)
        operators = {str(node.target) for p in programs for node in p.segment.graph.nodes}
        assert any("chunked" in name for name in operators) is bool(chunk_bytes)
        gradients = {name: p.grad for name, p in engine.parameters.items()}
        (outputs,) = engine.evaluate(columns[:1], [batch])
        num_rows.clear()
        (alone,) = engine.evaluate_each(columns[:1], [batch], only_loss=True)
        if chunk_bytes:
            assert list(alone) == ["loss"]
            assert sum(num_rows) == batch["labels"].numel() - len(batch["labels"])
        torch.testing.assert_close(alone["loss"], outputs["loss"])
        found.append((loss, gradients, outputs["logits"]))
    (loss, gradients, logits), *rest = found
    for other_loss, others, other_logits in rest:
        torch.testing.assert_close(loss, other_loss)
        assert torch.equal(logits, other_logits)  # evaluations that return them make all of them
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name])


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
def test_every_backward_of_a_transformer_is_a_graph(options: dict[str, str]) -> None:
    engine, batch = _engine(gpt2(), **options), text_batch()
    for _ in range(2):
        engine.train_step(0, [signature(batch).columns], [batch], 1.0)
    for program in engine._state.base.stages[0].segments:
        assert program.joint is not None
        assert program.joint.obstacle == ""


class Frames(TorchDispatchMode):
    """Counts operators by the Python frames from the loop over steps to them, both ends counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frames, frame = [], inspect.currentframe()
        while frame is not None and frame.f_code is not StepInterpreter.run_steps.__code__:
            frame = frame.f_back
            frames += [frame.f_code.co_filename] if frame is not None else []
        if frame is not None and "<merak joint graph>" in frames:
            self.found[len(frames) - frames.index("<merak joint graph>")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", ["off", "full", "selective"])
def test_nine_frames_from_the_loop_over_steps_to_an_operator(recompute: str) -> None:
    engine, batch = _engine(gpt2(), recompute=recompute), text_batch()
    for _ in range(2):
        with Frames() as frames:
            engine.train_step(0, [signature(batch).columns], [batch], 1.0)
    assert frames.found.total() > 100
    assert max(frames.found) <= 9


def test_what_is_offloaded_has_graphs_too() -> None:
    found = []
    for choice in ("off", "full"):
        torch.manual_seed(0)
        engine, batch = _engine(gpt2(), offload_activations=choice), text_batch()
        programs = engine._state.base.stages[0].segments
        assert all((p.offload is not None) == (choice == "full") for p in programs)
        steps = [engine.train_step(i, [signature(batch).columns], [batch], 1.0) for i in range(2)]
        assert all(p.joint is not None and p.joint.obstacle == "" for p in programs)
        found.append([*steps, *(p.grad for p in engine.parameters.values() if p.grad is not None)])
    assert all(map(torch.equal, *found))


def _calls(layers: int, microbatches: int) -> tuple[Counter[str], Counter[str], int]:
    """Operators of a step and of autograd's, and the step's calls of Python functions."""
    model, batches = gpt2(layers=layers), [text_batch(seed=i) for i in range(microbatches)]
    engine = _engine(gpt2(layers=layers), num_microbatches=microbatches)

    def step() -> None:
        engine.train_step(0, [signature(batch).columns for batch in batches], batches, 1.0)

    step()  # derives the graphs
    with Operators() as ours:
        step()
    with Operators() as theirs:
        for batch in batches:
            model(**batch).loss.backward()
    return ours.found, theirs.found, _python_calls(step)


def test_a_layer_calls_less_than_autograds() -> None:
    found = {(n, m): _calls(n, m) for n in (1, 3) for m in (1, 2)}

    def of_two_layers(what: int) -> Any:
        """In one microbatch more."""
        one, two = (found[3, m][what] - found[1, m][what] for m in (1, 2))  # type: ignore[operator]
        return two - one

    ours, theirs, calls = map(of_two_layers, range(3))
    aliases = 2 * 12  # of parameters
    assert ours["aten.mm.default"] == theirs["aten.mm.default"]
    assert ours.total() - aliases < theirs.total()
    assert calls < ours.total()  # nothing calls Python for an operator


def test_steps_leave_no_graphs_behind() -> None:
    engine, batch = _engine(gpt2()), text_batch()

    def count() -> Counter[type]:
        gc.collect()
        kinds = (fx.Node, JointSegment, Functions, FakeTensor)
        return Counter(kind for kind in map(type, gc.get_objects()) if kind in kinds)

    def steps(number: int) -> Counter[type]:
        for _ in range(number):
            engine.train_step(0, [signature(batch).columns], [batch], 1.0)
        return count()

    before = count()
    after_two = steps(2)
    assert after_two[fx.Node] == before[fx.Node]  # a joint graph goes when it is a function
    assert steps(8) == after_two

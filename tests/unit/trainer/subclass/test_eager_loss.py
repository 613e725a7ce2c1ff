"""A loss that values decide runs as Python behind its calls of the model, and is one process's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import merak
from merak.core import mesh
from merak.core.errors import MerakError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.branches.flags import optional_parameters
from tests.unit.trainer.subclass.test_host_reads import Use, close, trained, using


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


def eager(base: Any, use: Use) -> Any:
    cls = using(base, use)
    merak.eager_loss(cls.compute_loss)
    return cls


def of_one_step(use: Use, folder: Path) -> Any:
    given = {"max_steps": 1, "eval_strategy": "no"}
    return trained(eager(merak.MerakTrainer, use), merak.MerakArguments, folder, **given)


def by_values(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    """A loss with branches, loops and sizes of values, which it also reads and logs."""
    trainer.calls += 1
    own = trainer.by_mode[mode]
    large = error[error.abs() > 0.5]
    own["large"].append(large.shape[0])
    own["mean"].append(error.mean().item())
    own["list"].append(error[:, 0].tolist())
    own["array"].append(float(error.detach().numpy().max()))
    if trainer.is_world_process_zero() and len(large) > 2:
        trainer.seen.append(large.abs().max().item())
    if mode == "train":
        trainer.log({"own": loss.item(), "step": trainer.state.global_step})
    if large.shape[0] == 0:
        return loss * 3 + torch.Tensor([]).sum()
    if loss.item() > 1:
        loss = loss * 2
    for row in error:
        if row.sum() > 0:
            loss = loss + row.square().sum()
    for value in batch["target"].round().unique().tolist():
        loss = loss + error[batch["target"].round() == value].square().sum() / 7
    return loss + large.square().mean()


def test_losses_reads_and_logs_are_those_of_one_process(tmp_path: Path) -> None:
    their = trained(using(Trainer, by_values), TrainingArguments, tmp_path / "their")
    own = trained(eager(merak.MerakTrainer, by_values), merak.MerakArguments, tmp_path)
    assert own.calls == their.calls == 14
    close(own.seen, their.seen)
    close(own.by_mode, their.by_mode)
    for name in ("loss", "eval_loss", "own", "grad_norm"):
        found, wanted = (
            [log[name] for log in one.state.log_history if name in log] for one in (own, their)
        )
        assert wanted
        close(found, wanted)


def test_a_loss_function_of_a_loop_is_that_of_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    alone = copy.deepcopy(model)

    @merak.eager_loss
    def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = output[batch["label"]]
        return kept.square().mean() if len(kept) else output.abs().mean()

    batches = [
        {"input": torch.randn(3, 4), "label": torch.tensor(rows)}
        for rows in ([True, False, True], [False, False, False], [False, True, False])
    ]
    parallel = merak.parallelize(
        model, batches[0], loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    )
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        wanted = loss_fn(alone(batch["input"]), batch)
        wanted.backward()
        optimizer.step()
        assert parallel.step(batch).item() == pytest.approx(wanted.item(), rel=1e-5)
    close(list(model.parameters()), list(alone.parameters()))


def test_a_loss_of_boxes_is_tried_on_boxes() -> None:
    @merak.eager_loss
    def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not (output[:, 2:] >= output[:, :2]).all() or output.min() < 0 or output.max() > 1:
            raise ValueError("these are no boxes")
        return (output - batch["label"]).abs().sum()

    source = GraphSource(nn.Linear(4, 4), loss_fn=loss_fn, loss_columns=("label",))
    columns = {
        "input": TensorMeta((2, 4), torch.float32),
        "label": TensorMeta((2, 4), torch.float32),
    }
    graph = build_graph(source, columns, training=True)
    assert [name for segment in graph.segments for name in segment.parameters] == ["weight", "bias"]


class Heads(nn.Module):
    """Two heads, of which a loss may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.always(input), self.sometimes(input)


def test_a_loss_may_freeze_parameters_and_ask_for_their_sizes() -> None:
    model = nn.Linear(4, 4)

    @merak.eager_loss
    def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for weight in model.parameters():
            weight.requires_grad_(False).requires_grad = True
        return output.square().sum() / sum(weight.numel() for weight in model.parameters())

    source = GraphSource(model, loss_fn=loss_fn)
    columns = {"input": TensorMeta((2, 4), torch.float32)}
    graph = build_graph(source, columns, training=True)
    assert [name for segment in graph.segments for name in segment.parameters] == ["weight", "bias"]


def test_what_a_loss_uses_for_some_values_alone_is_known() -> None:
    class Chooses:
        def loss(self, output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = output[0].square().mean()
            return loss + output[1].mean() if batch["label"].sum() > 1 else loss

    loss_fn = merak.eager_loss(Chooses().loss)
    source = GraphSource(Heads(), loss_fn=loss_fn, loss_columns=("label",))
    columns = {"input": TensorMeta((2, 4), torch.float32), "label": TensorMeta((2,), torch.int64)}
    segments = build_graph(source, columns, training=True).segments
    optional = {name for segment in segments for name in optional_parameters(segment)}
    assert optional == {"sometimes.weight", "sometimes.bias"}


def again(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    if trainer.engine is not None and len(error[error.abs() < 1e9]):  # which no trace comes to
        return loss + trainer.model(batch["x"])["predicted"].sum()
    return loss


def keeps(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    trainer.seen.append(error.mean().detach())


def reads_much(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    trainer.by_mode[mode]["all"].append([error.tolist() for _ in range(200)])


def by_calls(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    trainer.calls += 1
    return loss * trainer.calls


def by_weight(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    return loss + trainer.model.layers[2].weight.square().sum()


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (again, "calls the model once more"),
        (keeps, "keeps something in .*seen.* numbers in place of tensors"),
        (reads_much, "bytes of values of a microbatch on the host, more than the 16384"),
        (by_calls, "computes something else behind the step"),
        (by_weight, "computes with layers.2.weight itself"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_stage_could_honour_is_refused(use: Use, why: str, tmp_path: Path) -> None:
    with pytest.raises(MerakError, match=why):
        of_one_step(use, tmp_path)

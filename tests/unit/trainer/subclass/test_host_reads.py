"""A loss reads values of tensors: a job has what one process has, or a sentence with the line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import merak
from merak.core import mesh
from merak.core.errors import TraceError, TrainingError
from merak.graph.trace.calls.replay import FakeMicrobatch


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


class Predicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"predicted": self.layers(x)}


Use = Callable[[Any, str, torch.Tensor, torch.Tensor, Any], Any]
"""`use(trainer, mode, loss, error, batch)` is what a loss does with its tensors."""


def using(base: Any, use: Use) -> Any:
    class Own(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: list[Any] = [0.0] * 1500  # of steps before
            self.by_mode: Any = defaultdict(lambda: defaultdict(list))
            self.calls = 0

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
        ) -> Any:
            mode = "train" if model.training else "eval"
            found = model(inputs["x"])
            error = found["predicted"] - inputs["target"]
            loss = error.square().mean()
            other = use(self, mode, loss, error, inputs)
            loss = loss if other is None else other
            return (loss, found) if return_outputs else loss

    return Own


def trained(cls: Any, kind: Any, folder: Path, callbacks: Any = (), **given: Any) -> Any:
    """A trainer that has trained on 15 samples, of which the last microbatch has one."""
    torch.manual_seed(0)
    samples = [{name: torch.randn(4) for name in ("x", "target")} for _ in range(15)]
    arguments: dict[str, Any] = {
        "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4,
        "per_device_eval_batch_size": 2, "label_names": ["target"], "remove_unused_columns": False,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    args = kind(output_dir=str(folder), **(arguments | given))
    data = {"train_dataset": samples, "eval_dataset": samples[:4]}
    trainer = cls(model=Predicts(), args=args, callbacks=list(callbacks), **data)
    trainer.train()
    return trainer


def of_both(use: Use, folder: Path, **given: Any) -> tuple[Any, Any]:
    their = trained(using(Trainer, use), TrainingArguments, folder / "their", **given)
    return trained(using(merak.MerakTrainer, use), merak.MerakArguments, folder, **given), their


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            close(one, other)
    else:
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def everything(
    trainer: Any, mode: str, loss: torch.Tensor, error: torch.Tensor, batch: Any
) -> None:
    trainer.calls += 1
    own = trainer.by_mode[mode]
    own["item"].append(error.abs().mean().item())
    own["list"].append(error[:, 0].tolist())
    own["float"].append(float(batch["target"].sum()))  # of the batch alone
    many = (error.abs() > 0.5).sum()
    own["chosen"].append((error.detach().sum() / many).item() if many > 0 else 0.0)
    own["selected"].append(error[batch["x"] > 0].sum().item())
    count = torch.tensor(len(batch["x"]), device=loss.device)
    own["count"] = [*own["count"], trainer.accelerator.gather_for_metrics(count).sum().item()]
    with torch.no_grad():
        own["array"].append(error.square().mean(1).numpy().max().item())
    trainer.seen.append(loss.detach())
    own["kept"].append(error.detach().mean())
    if mode == "train" and trainer.calls % 2:
        trainer.log({"own": round(loss.item(), 4), "step": trainer.state.global_step})


def test_what_a_loss_reads_is_what_it_is_in_one_process(tmp_path: Path) -> None:
    own, their = of_both(everything, tmp_path)
    assert own.calls == their.calls == 14
    close(own.seen, their.seen)
    close(own.by_mode, their.by_mode)
    logs = [[log for log in t.state.log_history if "own" in log] for t in (own, their)]
    assert len(logs[0]) == 5
    close(*logs)


def test_reads_go_on_when_a_number_changes_that_the_loss_computes_with(tmp_path: Path) -> None:
    def use(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
        weighed = loss * (1 + trainer.state.global_step)
        trainer.seen.append(weighed.item())
        trainer.seen.append(trainer.state.global_step)
        return weighed

    own, their = of_both(use, tmp_path)
    close(own.seen, their.seen)


def test_a_loss_runs_again_on_the_same_fakes_unless_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    make = FakeMicrobatch.of

    def noting(columns: Any, *rest: Any) -> FakeMicrobatch:
        made.append(tuple(columns.items()))
        return make(columns, *rest)

    monkeypatch.setattr(FakeMicrobatch, "of", staticmethod(noting))
    counts = []
    for writes in (False, True):
        made.clear()

        def use(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> None:
            part = error.detach().abs()
            view = part.view(-1)
            if writes:  # noqa: B023
                view.add_(1)
            with torch.no_grad():
                trainer.seen.append((part * 2).sum().item())

        own, their = of_both(use, tmp_path / str(writes), eval_strategy="no")
        close(own.seen, their.seen)
        assert own.state.global_step == 5
        counts.append((len(made), len(set(made))))
    assert counts == [(2, 2), (12, 2)]  # of two shapes; 10 microbatches, and a rehearsal for each


def by_item(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    trainer.seen.append(error.mean().item())
    return loss * 2 if loss.item() > 3 else loss  # decides


def by_boolean(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    if error.sum() == 0:  # decides
        loss = loss * 2
    trainer.seen.append(error.mean().item())
    return loss


def by_float(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
    trainer.seen.append(loss.item())
    return loss + error.sum() * abs(float(error.mean()))  # decides


@pytest.mark.parametrize("use", [by_item, by_boolean, by_float])
def test_a_read_that_decides_the_loss_is_refused_with_its_line(use: Use, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"test_host_reads.py:\d+: `.*# decides`, which decides"):
        trained(using(merak.MerakTrainer, use), merak.MerakArguments, tmp_path)


def test_a_read_that_decides_later_ends_the_training_before_its_step(tmp_path: Path) -> None:
    def use(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
        return loss * 2 if 0.76 < float(loss) < 39 else loss

    with pytest.raises(TrainingError, match=r"computes another loss in this step than when it was"):
        trained(using(merak.MerakTrainer, use), merak.MerakArguments, tmp_path)


def test_a_read_in_a_branch_that_no_trace_took_is_refused_with_its_line(tmp_path: Path) -> None:
    def use(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
        if 0.76 < float(loss) < 39:
            trainer.seen.append(error.mean().item())

    with pytest.raises(TrainingError, match=r"reads a tensor that it has not read .*append\(error"):
        trained(using(merak.MerakTrainer, use), merak.MerakArguments, tmp_path)


def test_a_loss_that_takes_gradients_and_reads_is_refused_with_its_line(tmp_path: Path) -> None:
    def use(trainer: Any, mode: str, loss: Any, error: Any, batch: Any) -> Any:
        weight = trainer.model.layers[2].weight
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        trainer.seen.append(error.mean().item())
        return loss + slope.square().sum()

    kind = using(merak.MerakTrainer, use)
    with pytest.raises(TraceError, match=r"cannot run again .*test_host_reads.py:\d+: .*grad\("):
        trained(kind, merak.MerakArguments, tmp_path)

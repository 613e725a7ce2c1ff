"""Arguments that differ by rank are refused before the first step, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from merak.core.errors import ArgumentsError, MeshError, PlanError, TrainingError
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import Classifier, Layout, batch_of
from tests.tiers import slow

SAMPLES = [{"x": torch.full((6,), float(i)), "y": torch.tensor(i % 4)} for i in range(16)]


def tenfold(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
) -> Any:
    outputs = model(**inputs)
    loss = 10 * outputs["loss"]
    return (loss, outputs) if return_outputs else loss


def train(rank: int, folder: str, name: str = "", values: Any = (), **more: Any) -> str:
    """Train two steps with one argument that differs; the sentence, empty where it trained."""
    import merak

    own = {name: values[rank]} if name and name not in ("compute_loss", "late") else {}
    more |= {"optimizer_cls_and_kwargs": own.pop("groups")} if "groups" in own else {}
    try:
        args = merak.MerakArguments(
            **{
                "output_dir": folder,
                "max_steps": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                **own,
            }
        )
        trainer = merak.MerakTrainer(Classifier(), args, train_dataset=SAMPLES, **more)
        if name == "late":
            trainer.args.learning_rate = values[rank]
        if name == "compute_loss" and values[rank]:
            trainer.compute_loss = MethodType(tenfold, trainer)  # type: ignore[method-assign]
        trainer.train()
    except ArgumentsError as error:
        return str(error)
    return ""


TRAINER: list[tuple[str, tuple[Any, Any], str]] = [
    ("learning_rate", (0.1, 0.3), "learning_rate differs by rank: 0.1 on rank 0, 0.3 on rank 1"),
    ("late", (0.1, 0.3), "learning_rate differs by rank: 0.1 on rank 0, 0.3 on rank 1"),
    ("max_grad_norm", (1.0, 0.2), "max_grad_norm differs by rank: 1.0 on rank 0, 0.2 on rank 1"),
    ("max_steps", (2, 3), "max_steps differs by rank: 2 on rank 0, 3 on rank 1"),
    ("lr_scheduler_type", ("linear", "constant"), "lr_scheduler_type differs by rank: 'linear' on"),
    ("per_device_train_batch_size", (8, "auto"), "batch_size differs by rank: 8 on rank 0, 'auto'"),
    ("resume_from_checkpoint", ("auto", None), "resume_from_checkpoint differs by rank: 'auto' on"),
    ("recompute", ("off", "full"), "recompute differs by rank: 'off' on rank 0, 'full' on rank"),
    (
        "groups",
        ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.3})),
        "optimizer's default lr differs by rank: 0.1 on rank 0, 0.3 on rank 1",
    ),
    ("compute_loss", (True, False), "compute_loss differs by rank: tenfold on rank 0, None on"),
    ("log_level", ("info", "error"), ""),
    ("local_rank", (0, 1), ""),
    ("run_name", ("one", "two"), ""),
    ("trace_cache", ("", None), ""),
]


def sentences(layout: Layout, folder: str) -> list[str]:
    import merak

    dp, tp, pp = layout
    rank = merak.init(dp=dp, tp=tp, pp=pp, device="cpu").rank
    found = [train(rank, folder, name, values) for name, values, _ in TRAINER]
    found.append(train(rank, f"{folder}-{rank}"))
    found.append(train(rank, folder, callbacks=[Finder()]))
    return found


class Finder(TrainerCallback):
    """Raises the learning rate from step to step, as a search for it does."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **of_step: Any) -> None:
        for group in of_step["optimizer"].param_groups:
            group["lr"] = 1e-6 * 10**state.global_step


class OwnRate(TrainerCallback):
    """Sets a learning rate of each rank's own, once there is an optimizer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_training: Any) -> None:
        for group in of_training["optimizer"].param_groups:
            group["lr"] = (0.1, 0.3)[args.process_index]


def models(folder: str) -> tuple[str, str]:
    """What is said of a callback that sets other rates, and of a model with another dropout."""
    import merak

    rank = merak.init(pp=2, device="cpu").rank
    with pytest.raises(TrainingError) as of_rates:
        train(rank, folder, callbacks=[OwnRate()])
    model = nn.Sequential(Classifier().wide, nn.Dropout((0.1, 0.2)[rank]), Classifier().narrow)
    with pytest.raises(PlanError) as of_dropout:
        merak.parallelize(
            model, {"input": torch.ones(4, 16)}, loss_fn=lambda outputs, _: outputs.sum()
        )
    return str(of_rates.value), str(of_dropout.value)


def test_rates_of_a_callback_and_models_are_compared(pool: RankPool, tmp_path: Any) -> None:
    one, two = pool.run(models, 2, str(tmp_path / "out"))
    assert one == two
    assert "lr of optimizer group 0 is 0.1 on rank 0 and 0.3 on rank 1" in one[0]
    assert "Ranks 0 and 1 have traced different models" in one[1]


def other_degrees() -> str:
    import os

    import merak

    with pytest.raises(MeshError) as caught:
        merak.init(**({"pp": 2} if os.environ["RANK"] == "0" else {"tp": 2}), device="cpu")
    return str(caught.value)


def test_degrees_are_compared(pool: RankPool) -> None:
    one, two = pool.run(other_degrees, 2)
    assert one == two
    assert "dp=1 × tp=1 × pp=2 × ep=1 on rank 0, dp=1 × tp=2 × pp=1 × ep=1 on rank 1" in one


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_a_trainer_names_what_differs(pool: RankPool, tmp_path: Any, layout: Layout) -> None:
    one, two = pool.run(sentences, 2, layout, str(tmp_path / "out"))
    assert one == two
    assert one[-2:] == ["", ""]
    for said, (name, _, sentence) in zip(one, TRAINER):
        assert sentence in said if sentence else said == "", name


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def decayed(decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        matrices = [p for p in own if p.ndim > 1]
        others = [p for p in own if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-3)

    return make


LOOP: list[tuple[str, tuple[Any, Any], str]] = [
    ("optimizer", (sgd(0.1), sgd(0.3)), "optimizer's default lr differs by rank: 0.1 on rank 0, "),
    ("optimizer", (decayed(0.1), decayed(0.2)), "weight_decay of optimizer group 0 differs by ran"),
    ("optimizer", (sgd(0.1), None), "optimizer differs by rank: sgd.<locals>.<lambda> on rank 0, "),
    ("num_microbatches", (2, 4), "num_microbatches differs by rank: 2 on rank 0, 4 on rank 1"),
    ("max_grad_norm", (1.0, None), "max_grad_norm differs by rank: 1.0 on rank 0, None on rank 1"),
    ("schedule", ("1f1b", "gpipe"), "schedule differs by rank: '1f1b' on rank 0, 'gpipe' on rank"),
    ("seed", (1, 2), "seed differs by rank: 1 on rank 0, 2 on rank 1"),
    ("memory_budget", (2**30, 2**31), ""),
]


def loops() -> list[str]:
    import merak

    rank = merak.init(pp=2, device="cpu").rank
    found = []
    for name, values, _ in LOOP:
        own: dict[str, Any] = {"optimizer": sgd(0.1), "num_microbatches": 2, name: values[rank]}
        try:
            merak.parallelize(Classifier(), batch_of(0, "loss"), **own).step(batch_of(0, "loss"))
            found.append("")
        except ArgumentsError as error:
            found.append(str(error))
    return found


def test_a_loop_names_what_differs(pool: RankPool) -> None:
    one, two = pool.run(loops, 2)
    assert one == two
    for said, (name, _, sentence) in zip(one, LOOP):
        assert sentence in said if sentence else said == "", name

"""Trainings that go on, in other layouts, from checkpoints that transformers' own Trainer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, alone, make_merak, make_reference, model_of
from tests.tiers import slow

SAVED, END = 3, 6
FROZEN = {"gpt2": "transformer.h.1.mlp.c_fc.weight", "llama": "", "bert": "", "plain": ""}


def job(family: str, folder: Path, **arguments: Any) -> Setup:
    usual = {
        "output_dir": str(folder), "max_steps": END, "save_strategy": "steps", "save_steps": SAVED,
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "learning_rate": 1e-3,
    }  # fmt: skip
    return Setup(family, num_microbatches=2, num_samples=24, arguments=usual | arguments)


def built(setup: Setup) -> torch.nn.Module:
    """The model, a parameter of which may be frozen."""
    model = model_of(setup)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != FROZEN[setup.family])
    return model


def logs(trainer: Any) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(log["loss"], log["learning_rate"]) for log in history if "loss" in log]


class Loaded(TrainerCallback):
    """Keeps the first moments that a training begins with, by parameter name."""

    def __init__(self) -> None:
        self.moments: dict[str, torch.Tensor] = {}

    def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self.moments = {
            name: inner.state[tensor]["exp_avg"].clone()
            for name, tensor in self.parameters().items()
            if tensor in inner.state
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """What the optimizer of a process steps, by parameter name."""
        items = self.trainer.engine.optimizer_params.items
        return {name: item.tensor for name, item in items.items()}

    trainer: Any = None


class LoadedAlone(Loaded):
    """The same for transformers' own trainer."""

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.trainer.model.named_parameters())


def resume(layout: Layout, setup: Setup, cache: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Logs of a resumed training, and the first moments of this rank's parameters."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    loaded = Loaded()
    loaded.trainer = make_merak(setup, dp, cache, model=built(setup), callbacks=[loaded])
    loaded.trainer.train(resume_from_checkpoint=True)
    return logs(loaded.trainer), loaded.moments


ROWS = [
    ((1, 1, 2), "gpt2", {}),
    slow((2, 1, 1), "gpt2", {"zero": 1, "master_weights": True}),
    slow((2, 1, 1), "bert", {"zero": 3}),
    slow((1, 2, 1), "gpt2", {}),
    slow((1, 2, 2), "llama", {"schedule": "interleaved_1f1b"}),
    slow((1, 1, 2), "plain", {}),
    slow((1, 2, 1), "llama", {"optim": "adamw_torch_fused"}),
]


@pytest.mark.parametrize(("layout", "family", "further"), ROWS)
def test_a_training_goes_on(
    pool: RankPool, tmp_path: Path, layout: Layout, family: str, further: dict[str, Any]
) -> None:
    dp, tp, pp = layout
    setup = job(family, tmp_path / "out")
    with alone():
        whole = make_reference(setup, model=built(setup))
        whole.train()
        loaded = LoadedAlone()
        loaded.trainer = make_reference(setup, model=built(setup), callbacks=[loaded])
        loaded.trainer.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-{SAVED}")
    (tmp_path / "out" / f"checkpoint-{END}").rename(tmp_path / "last")
    ours = job(family, tmp_path / "out", **further)
    ranks = pool.run(resume, dp * tp * pp, layout, ours, str(tmp_path / "cache"))
    assert len(loaded.moments) > 10
    compared = set()
    for found, moments in ranks:
        assert len(found) == END
        for (loss, rate), (theirs, their_rate) in zip(found, logs(whole), strict=True):
            assert loss == pytest.approx(theirs, rel=1e-5)
            assert rate == their_rate
        for name, moment in moments.items():
            if moment.shape == loaded.moments[name].shape:
                assert torch.equal(moment, loaded.moments[name]), name
                compared.add(name)
    assert tp > 1 or "zero" in further or compared == loaded.moments.keys()

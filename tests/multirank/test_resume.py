"""Jobs that are resumed: bit for bit as if they had gone on, and alike in every other layout."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import merak
from merak.checkpoint import storage
from merak.checkpoint.storage import CheckpointWriter
from merak.core.errors import SavingError
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, make_merak
from tests.tiers import slow

# Four steps are an epoch: the third is in the middle of one, and shuffled data follow.
MIDDLE, END = 3, 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def digest(trainer: Any) -> str:
    """The bits of all that a rank trains: parameters, masters, the optimizer's state."""
    engine, found = trainer.engine, hashlib.sha256()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    tensors = dict(engine.parameters) | dict(engine.optimizer_params.named)
    for name, parameter in sorted(tensors.items()):
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in [(name, parameter), *sorted(state.items())]:
            data = torch.as_tensor(value).detach().contiguous().reshape(-1).view(torch.uint8)
            found.update(str(key).encode() + data.numpy().tobytes())
    return found.hexdigest()


@contextmanager
def writing_late(trainer: Any) -> Iterator[None]:
    """Inside, a checkpoint is written when two further steps have changed what it is of."""
    later, write = threading.Event(), CheckpointWriter.write_data

    def wait(*args: Any) -> Any:
        assert later.wait(300)
        return write(*args)

    class Release(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= MIDDLE + 2:
                later.set()

    trainer.add_callback(Release())
    with mock.patch.object(CheckpointWriter, "write_data", wait):
        yield


def saving(folder: str, **arguments: Any) -> dict[str, Any]:
    steps = {"save_strategy": "steps", "save_steps": MIDDLE, "max_steps": END}
    return {"output_dir": folder, **steps, **arguments}


def stopped_and_resumed(
    layout: Layout, setup: Setup, folder: str, cache: str
) -> list[tuple[list[float], str]]:
    """Losses and bits of a job, and of one that goes on from its middle."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    job = replace(setup, arguments=saving(folder, **setup.arguments))
    whole = make_merak(job, dp, cache)
    with writing_late(whole) if whole.args.async_save else nullcontext():
        whole.train()
    resumed = make_merak(job, dp, cache)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{MIDDLE}")
    return [(losses_of(trainer), digest(trainer)) for trainer in (whole, resumed)]


def job(family: str = "gpt2", **arguments: Any) -> Setup:
    return Setup(family, dropout=0.1, arguments=arguments)


ROWS = [
    ((2, 1, 2), job(zero=1, master_weights=True)),
    slow((1, 2, 2), job("llama", schedule="interleaved_1f1b")),
    slow((2, 1, 1), job(zero=3)),
    slow((1, 2, 1), job("bert", optim="adafactor")),
    slow((1, 2, 1), job("plain", lr_scheduler_type="cosine", warmup_steps=2)),
    slow((2, 1, 2), job(fp16=True)),
    slow((1, 1, 2), job(async_save=False)),
    *(
        slow((1, 1, 2), job(schedule=schedule))
        for schedule in ("chimera zero_bubble_h1 interleaved_zero_bubble auto").split()
    ),
    slow((1, 1, 2), job("llama", schedule="pipedream_2bw")),
]


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("layout", "setup"), ROWS)
def test_a_resumed_job_equals_the_one_that_went_on(
    pool: RankPool, tmp_path: Path, cache: str, layout: Layout, setup: Setup
) -> None:
    dp, tp, pp = layout
    for whole, resumed in pool.run(
        stopped_and_resumed, dp * tp * pp, layout, setup, str(tmp_path), cache
    ):
        assert len(whole[0]) == END
        assert resumed == whole


def run(
    layout: Layout, setup: Setup, steps: int, resume: str | None, cache: str
) -> tuple[list[float], list[int]]:
    """Losses of a job, and the samples that it has read."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    trainer = make_merak(setup, dp, cache)
    trainer.args.max_steps = steps
    read: list[int] = []
    get = type(trainer.train_dataset).__getitem__
    noting = mock.patch.object(
        type(trainer.train_dataset), "__getitem__",
        lambda data, index: (read.append(index), get(data, index))[1],
    )  # fmt: skip
    with noting:
        trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer), read


OTHERS = [
    slow((2, 2, 1), {"zero": 2}),
    slow((1, 2, 2), {"schedule": "zero_bubble_h1"}),
    slow((4, 1, 1), {"zero": 3}),
]


@pytest.mark.parametrize(("layout", "arguments"), OTHERS)
def test_a_job_goes_on_alike_in_another_layout(
    pool: RankPool, tmp_path: Path, cache: str, layout: Layout, arguments: dict[str, Any]
) -> None:
    """Over 20 steps, with the data's order, of which nothing is read again."""
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1e-3}
    first = Setup("gpt2", arguments=saving(str(tmp_path), save_steps=5, **constant))
    ((whole, _), *_) = pool.run(run, 2, (1, 1, 2), first, 25, None, cache)
    other = replace(first, arguments={**first.arguments, "save_strategy": "no", **arguments})
    dp, tp, pp = layout
    checkpoint = str(tmp_path / "checkpoint-5")
    ((found, read), *_) = pool.run(run, dp * tp * pp, layout, other, 25, checkpoint, cache)
    assert found[-20:] == pytest.approx(whole[-20:], rel=1e-5)
    # The first samples are read for the shapes; of the epoch's, one of two that were trained on
    # would be read twice if they were skipped by reading them.
    assert len(read) <= 20 * 16 // dp + 2 * 4 + 4 * 4


def full_disk(folder: str, cache: str) -> list[str]:
    """A job whose second checkpoint cannot be written on one rank."""
    merak.init(pp=2, device="cpu")
    setup = Setup("gpt2", arguments=saving(folder, save_steps=2))
    trainer = make_merak(setup, 1, cache)
    save, told = storage.save_file, []

    def fail(tensors: Any, path: Path) -> None:
        if "checkpoint-4" in str(path) and trainer.mesh.rank == 1:
            raise OSError(28, "No space left on device")
        save(tensors, path)

    with mock.patch.object(storage, "save_file", fail):
        try:
            trainer.train()
        except SavingError as error:
            told.append(str(error))
    return told


def test_a_full_disk_leaves_the_checkpoint_before(
    pool: RankPool, tmp_path: Path, cache: str
) -> None:
    for (told,) in pool.run(full_disk, 2, str(tmp_path), cache):
        assert "checkpoint-4 could not be written: No space left on device" in told
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "_merak"}
    ((losses, _), _) = pool.run(
        run, 2, (1, 1, 2), Setup("gpt2", arguments=saving(str(tmp_path))), END, "auto", cache
    )
    assert len(losses) == END


class FirstIsBest(merak.MerakTrainer):
    """A trainer whose evaluations find every model worse than the one before."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def keeping(folder: str, cache: str) -> tuple[str | None, bool]:
    """A job that keeps two checkpoints, the first of them for the best."""
    merak.init(pp=2, device="cpu")
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    setup = Setup("gpt2", arguments=saving(folder, **evaluating, **best, save_total_limit=2))
    trainer = make_merak(
        setup, 1, cache, trainer_class=FirstIsBest, eval_dataset=[{"input_ids": [1]}]
    )
    first: dict[str, torch.Tensor] = {}

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                held = trainer.engine.parameters.items()
                first.update({name: value.detach().clone() for name, value in held})

    trainer.add_callback(Note())
    trainer.train()
    now = trainer.engine.parameters
    return trainer.state.best_model_checkpoint, all(torch.equal(now[n], first[n]) for n in first)


@pytest.mark.slow
def test_the_newest_and_the_best_are_kept(pool: RankPool, tmp_path: Path, cache: str) -> None:
    for best, is_loaded in pool.run(keeping, 2, str(tmp_path), cache):
        assert best == str(tmp_path / "checkpoint-1")
        assert is_loaded
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-1", f"checkpoint-{END}", "_merak"
    }  # fmt: skip

"""Callbacks that look at a model in parts, and a hub that rank 0 cannot reach."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback
from transformers.integrations import WandbCallback
from transformers.integrations.integration_utils import WandbLogModel

from merak.core.errors import ArgumentsError, ScheduleError, TrainingError
from merak.core.rank0 import warn_once
from tests.multirank.ranks import RankPool, as_script
from tests.multirank.training import Layout, Setup, make_merak
from tests.tiers import slow

SETUP = Setup("gpt2", padded=False, arguments={"max_steps": 2, "optim": "sgd"})


class Scales(TrainerCallback):
    """Scales the gradients that it sees."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0)


class Clips(TrainerCallback):
    """Clips by the norm of the gradients that it sees."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(kwargs["model"].parameters(), 0.01)


class Values(TrainerCallback):
    """Reads the value of every parameter."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _, parameter in kwargs["model"].named_parameters():
            parameter.abs().max().item()


class Averages(TrainerCallback):
    """Keeps an average of the weights in a copy of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average = AveragedModel(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update_parameters(kwargs["model"])


class Messages(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@as_script
def train(layout: Layout, cache: str) -> tuple[list[str], str]:
    """What is warned of, and what is said where a callback reads what is not here."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    warn_once.cache_clear()  # of another layout in this process
    messages = Messages()
    logging.getLogger("merak").addHandler(messages)
    try:
        make_merak(SETUP, dp, cache, callbacks=[Scales()]).train()
    finally:
        logging.getLogger("merak").removeHandler(messages)
    said = ""
    try:
        make_merak(SETUP, dp, cache, callbacks=[Values()]).train()
    except TrainingError as error:
        said = str(error)
    return [text for text in messages.texts if "Scales." in text], said


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_callbacks_are_told_that_they_see_a_part(
    pool: RankPool, cache: str, layout: Layout
) -> None:
    (first, said), (other, _) = pool.run(train, 2, layout, cache)
    dp, _, pp = layout
    assert other == []
    if dp == 2:
        assert first == []
    else:
        reads, walks = first
        assert reads.startswith("Scales.on_pre_optimizer_step reads gradients, and each rank has")
        assert walks.startswith("Scales.on_pre_optimizer_step walks the model's parameters")
        assert "as shards" in walks or pp == 2
    assert said.startswith("a callback reads a value ") == (dp == 1)
    assert ("that this rank does not have" in said) == (pp == 2)
    assert ("parameter.abs().max().item()" in said) == (dp == 1)


@as_script
def train_clipped(layout: Layout, cache: str) -> str:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    trainer = make_merak(SETUP, dp, cache, callbacks=[Clips()])
    try:
        trainer.train()
    except TrainingError as error:
        return f"step {trainer.state.global_step}: {error}"
    return ""


@pytest.mark.parametrize("layout", [slow((1, 2, 1)), slow((2, 1, 1))])
def test_norms_of_a_part_clip_nothing(pool: RankPool, cache: str, layout: Layout) -> None:
    for said in pool.run(train_clipped, 2, layout, cache):
        expected = "step 0: Clips.on_pre_optimizer_step clips gradients by their norm"
        assert said.startswith(expected) == (layout[0] == 1)


def train_averaged(layout: Layout, cache: str) -> tuple[list[str], bool]:
    """What is warned of, and whether this rank's averages are those of its weights."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    warn_once.cache_clear()
    messages, averages = Messages(), Averages()
    logging.getLogger("merak").addHandler(messages)
    setup = Setup("gpt2", padded=False, arguments={**SETUP.arguments, "max_steps": 1})
    try:
        trainer = make_merak(setup, dp, cache, callbacks=[averages])
        trainer.train()
    finally:
        logging.getLogger("merak").removeHandler(messages)
    pairs = zip(averages.average.module.parameters(), trainer.model.parameters(), strict=True)
    own = [torch.equal(kept, now) for kept, now in pairs if not now.is_meta]
    return [text for text in messages.texts if "copies the model" in text], all(own)


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_copies_of_a_part_are_told(pool: RankPool, cache: str, layout: Layout) -> None:
    for rank, (said, are_averages) in enumerate(pool.run(train_averaged, 2, layout, cache)):
        assert are_averages
        assert len(said) == (rank == 0 and layout[0] == 1)
        assert all("AveragedModel(kwargs" in text and "part by part" in text for text in said)


@as_script
def train_sharded(zero: int, cache: str) -> str:
    import merak

    merak.init(dp=2, device="cpu")
    setup = Setup("gpt2", padded=False, arguments={**SETUP.arguments, "zero": zero})
    try:
        make_merak(setup, 2, cache, callbacks=[Scales()]).train()
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("zero", [0, slow(1), slow(3)])
def test_gradients_that_parameters_do_not_have_are_not_read(
    pool: RankPool, cache: str, zero: int
) -> None:
    for said in pool.run(train_sharded, 2, zero, cache):
        expected = f"Scales.on_pre_optimizer_step reads or writes gradients, but with zero={zero}"
        assert said.startswith(expected) == (zero > 0)


def train_uploading(layout: Layout, cache: str) -> str:
    """What is said of a logger that uploads the model when training ends."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    # As it is with WANDB_LOG_MODEL=end, but for the package, without which it does nothing.
    uploading = WandbCallback.__new__(WandbCallback)
    uploading._wandb, uploading._log_model = None, WandbLogModel.END
    try:
        trainer = make_merak(SETUP, dp, cache, callbacks=[uploading])
        trainer.train()
    except ArgumentsError as error:
        return f"step {trainer.state.global_step}: {error}"
    return ""


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_uploads_of_a_part_are_refused_before_training(
    pool: RankPool, cache: str, layout: Layout
) -> None:
    degrees = {(1, 1, 2): "pp=2", (1, 2, 1): "tp=2"}
    expected = "" if layout not in degrees else (
        "step 0: WandbCallback uploads the model from rank 0 when training ends "
        f"(WANDB_LOG_MODEL=end), but each rank has a part of it ({degrees[layout]}); leave that "
        "out, and upload the folder that trainer.save_model() writes."
    )  # fmt: skip
    assert pool.run(train_uploading, 2, layout, cache) == [expected] * 2


class Hooks(TrainerCallback):
    """Registers a hook on the gradient of some parameters when training begins."""

    def __init__(self, part: str) -> None:
        self.part = part

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            if self.part in name:
                parameter.register_hook(lambda gradient: gradient * 0.5)


def train_hooked(layout: Layout, part: str, cache: str) -> str:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    try:
        make_merak(SETUP, dp, cache, callbacks=[Hooks(part)]).train()
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((1, 2, 1))])
def test_later_hooks_that_would_not_run_are_refused(
    pool: RankPool, cache: str, layout: Layout
) -> None:
    for said in pool.run(train_hooked, 2, layout, "wte", cache):  # which the head reads, too
        assert said.startswith("transformer.wte.weight has a hook on its gradient, but it is read")
    assert pool.run(train_hooked, 2, layout, "mlp", cache) == ["", ""]


def push(folder: str, cache: str, when: str) -> str:
    """What a rank says of a hub that is out of reach."""
    import merak

    merak.init(pp=2, device="cpu")
    given = {"output_dir": folder, "push_to_hub": when == "at once", "hub_model_id": "own/model"}
    setup = Setup("gpt2", padded=False, arguments={**SETUP.arguments, **given})
    with mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        try:
            trainer = make_merak(setup, 1, cache)
            trainer.train()
            trainer.push_to_hub()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("when", ["at once", slow("at the end")])
def test_every_rank_tells_why_rank_0_cannot_push(
    pool: RankPool, cache: str, tmp_path: Path, when: str
) -> None:
    first, other = pool.run(push, 2, str(tmp_path / "run"), cache, when)
    assert "ffline" in first
    assert other.startswith("Rank0Error: rank 0 could not")
    assert first.partition(": ")[2][:40] in other

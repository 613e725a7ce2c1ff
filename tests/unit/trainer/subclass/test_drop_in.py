"""What scripts do with transformers' trainer, in one process."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    default_data_collator,
    integrations,
)
from transformers.trainer_utils import HPSearchBackend

import merak
from merak.core import mesh
from merak.core.errors import ArgumentsError, TraceError, TrainingError
from merak.trainer.live.display import LineDisplay, LiveDisplay
from merak.trainer.unsupported import refuse_search


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


SAMPLES = [{"x": torch.ones(4) * i, "labels": torch.zeros(4)} for i in range(15)]


@dataclass
class OwnArguments(merak.MerakArguments):
    """Fields of a script's own, as Alpaca, LLaVA and TRL have them."""

    model_max_length: int = field(default=512, metadata={"help": "tokens"})


class OwnLoaders(merak.MerakTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        assert isinstance(self.train_dataset, list)
        return DataLoader(self.train_dataset, 5, collate_fn=default_data_collator)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return DataLoader(SAMPLES, 4, collate_fn=default_data_collator)  # type: ignore[arg-type]


def arguments(folder: Path, **more: Any) -> OwnArguments:
    return OwnArguments(
        output_dir=str(folder), disable_tqdm=True, save_strategy="no", num_train_epochs=1, **more
    )


def test_arguments_have_fields_of_ones_own(tmp_path: Path) -> None:
    assert arguments(tmp_path, model_max_length=7).model_max_length == 7
    with pytest.raises(ArgumentsError, match="fsdp"):
        arguments(tmp_path, model_max_length=7, fsdp="full_shard")


def test_a_trainer_is_made_by_position(tmp_path: Path) -> None:
    trainer = merak.MerakTrainer(Model(), arguments(tmp_path), default_data_collator, SAMPLES)
    assert trainer.data_collator is default_data_collator
    assert trainer.train_dataset is SAMPLES
    with pytest.raises(TypeError, match="positional arguments"):
        merak.MerakTrainer(Model(), arguments(tmp_path), *[None] * 20)


def test_loaders_of_ones_own_are_read(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    trainer = OwnLoaders(Model(), args, train_dataset=SAMPLES, eval_dataset=SAMPLES)
    assert trainer.train().global_step == 3  # of 5 samples each
    made = trainer.evaluation_loop(trainer.get_eval_dataloader(), "all of them", False)
    assert made.predictions.shape == (15, 4)  # type: ignore[union-attr]


def test_an_optimizer_is_made_before_training(tmp_path: Path) -> None:
    trainer = merak.MerakTrainer(Model(), arguments(tmp_path), train_dataset=SAMPLES)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    made, before = trainer.optimizer, trainer.model.linear.weight.detach().clone()
    trainer.train()
    assert trainer._inner_optimizer() is made
    assert not trainer.model.linear.weight.equal(before)


def test_an_optimizer_whose_package_is_missing_is_refused_before_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_torchao_available", lambda: False)
    args = arguments(tmp_path, optim="adamw_torch_8bit")
    with pytest.raises(ArgumentsError, match=r"optim='adamw_torch_8bit' cannot be made: .*torchao"):
        merak.MerakTrainer(Model(), args, train_dataset=SAMPLES)


def test_accelerate_counts_the_microbatches_of_a_step(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = arguments(tmp_path, accelerator_config=config, per_device_train_batch_size=5)
    trainer = merak.MerakTrainer(Model(), args, train_dataset=SAMPLES)
    assert trainer.train().global_step == 2  # of three batches


class Dividing(Model):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x) / (x * 0)
        return {"loss": nn.functional.mse_loss(logits, labels)}


def test_an_overflow_is_looked_for(tmp_path: Path) -> None:
    args = arguments(tmp_path, debug="underflow_overflow")
    trainer = merak.MerakTrainer(Dividing(), args, train_dataset=SAMPLES)
    with pytest.raises(TrainingError, match=r"logits = self.linear\(x\) / \(x \* 0\)"):
        trainer.train()


@pytest.mark.parametrize("tqdm", [True, False])
def test_a_script_removes_the_display_by_the_name_of_the_bar(tmp_path: Path, tqdm: bool) -> None:
    args = arguments(tmp_path)
    args.disable_tqdm = not tqdm
    trainer = merak.MerakTrainer(Model(), args, train_dataset=SAMPLES)
    there, other = (ProgressCallback, PrinterCallback)[:: 1 if tqdm else -1]
    shown = trainer.callback_handler.callbacks[-1]
    assert type(shown) is there
    assert isinstance(shown.on_log.__self__, LiveDisplay | LineDisplay)  # type: ignore[attr-defined]
    trainer.remove_callback(other)
    assert trainer.pop_callback(other) is None
    assert trainer.pop_callback(there) is shown
    assert shown not in trainer.callback_handler.callbacks


class OwnLoss(merak.MerakTrainer):
    """A loss that does more than to compute."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[str, list[Any]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = self.beside(outputs["loss"])
        return (loss, outputs) if return_outputs else loss


class Counting(OwnLoss):
    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss * self.calls


class ReadingSeen(OwnLoss):
    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss * (1 + len(self.seen["loss"]))
        self.seen["loss"].append(loss.detach())
        return total


class LateBranch(OwnLoss):
    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss if self.calls < 100 else loss * 2


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Counting, "forward leaves values in the loss function.self.calls, at"),
        (LateBranch, "counts in the loss function.self.calls, at"),
        (ReadingSeen, "forward leaves values in the loss function.self.seen"),
    ],
)
def test_a_loss_of_ones_own_that_changes_the_trainer_is_refused(
    tmp_path: Path, kind: type[OwnLoss], sentence: str
) -> None:
    trainer = kind(Model(), arguments(tmp_path), train_dataset=SAMPLES)
    with pytest.raises(TraceError) as caught:
        trainer.train()
    assert sentence in str(caught.value)
    assert not any(trainer.seen.values())


class AsNumber(OwnLoss):
    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if float(loss) > 3 else 2 * loss


def test_a_loss_that_reads_a_value_is_reported_at_its_own_line(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
    samples = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
    trainer = AsNumber(GPT2LMHeadModel(config), arguments(tmp_path), train_dataset=samples)
    with pytest.raises(TraceError) as caught:
        trainer.train()
    line = AsNumber.beside.__code__.co_firstlineno + 1
    read = f"reads a value of a tensor at {__file__}:{line}: `return loss if float("
    assert read in str(caught.value)


class Searching(merak.MerakTrainer):
    def _get_output_dir(self, trial: object) -> str:  # which asks the backend, not installed here
        return str(self.args.output_dir)


def search(trainer: merak.MerakTrainer) -> list[float]:
    """What transformers' backends do: a training and an evaluation for each trial."""
    trainer.hp_search_backend = HPSearchBackend.WANDB
    found = []
    for rate in (0.0, 1e-3):
        trainer.train(trial={"learning_rate": rate})
        found.append(trainer.evaluate()["eval_loss"])
    trainer.hp_search_backend = None
    return found


def test_hyperparameters_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes no trial whose backend is not installed.
    monkeypatch.setattr(integrations, "hp_params", dict)
    args = arguments(tmp_path, logging_strategy="no")

    def make() -> nn.Module:
        torch.manual_seed(1)
        return Model()

    trainer = Searching(None, args, None, SAMPLES, SAMPLES, model_init=make)
    without, with_rate = search(trainer)
    assert with_rate < without


def test_several_ranks_search_with_optuna_alone() -> None:
    refuse_search(HPSearchBackend.RAY, 1)
    refuse_search("optuna", 2)
    refuse_search(HPSearchBackend.OPTUNA, 2)
    with pytest.raises(ArgumentsError, match=r"backend='ray' would run .*backend='optuna', or run"):
        refuse_search(HPSearchBackend.RAY, 2)


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 9) * (index + 1) % 30 + 3
        return {"input_ids": ids, "labels": ids.flip(0)}


@dataclass(repr=False)
class GeneratesArguments(merak.MerakArguments, Seq2SeqTrainingArguments):
    """Arguments of both kinds."""


class Generates(merak.MerakTrainer, Seq2SeqTrainer):
    """A trainer of both kinds."""


def test_one_process_evaluates_by_generation(tmp_path: Path) -> None:
    def evaluated(trainer: type[Any], kind: type[Any]) -> Any:
        torch.manual_seed(0)
        config = T5Config(
            d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=40, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        args = kind(
            str(tmp_path), max_steps=2, per_device_train_batch_size=3, optim="sgd",
            learning_rate=0.1, predict_with_generate=True, generation_max_length=7,
            save_strategy="no", disable_tqdm=True, report_to="none", use_cpu=True,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        made = trainer(model=model, args=args, train_dataset=Pairs(), eval_dataset=Pairs())
        made.train()
        found = made.predict(Pairs())
        return found.metrics["test_loss"], found.predictions.tolist()

    loss, words = evaluated(Generates, GeneratesArguments)
    expected, their_words = evaluated(Seq2SeqTrainer, Seq2SeqTrainingArguments)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert words == their_words


class OutOfMemory(TrainerCallback):
    """Runs out of memory where a batch is above 3 samples, as a device would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.train_batch_size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def test_a_batch_that_fits_is_found(tmp_path: Path) -> None:
    args = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=5)
    trainer = merak.MerakTrainer(
        Model(),
        args,
        train_dataset=SAMPLES,
        callbacks=[OutOfMemory()],
        data_collator=default_data_collator,
    )
    assert trainer.train().global_step == 5
    assert trainer._train_batch_size == 3


@pytest.mark.parametrize("cls", [merak.MerakTrainer, merak.MerakSeq2SeqTrainer])
def test_editors_see_every_argument_of_the_trainer(cls):
    """By its name, in transformers' order, with its default."""
    own, theirs = inspect.signature(cls), inspect.signature(transformers.Trainer)
    *named, further = own.parameters.values()
    assert [one.name for one in named] == list(theirs.parameters)
    assert [one.default for one in named] == [one.default for one in theirs.parameters.values()]
    assert all(one.annotation is not inspect.Parameter.empty for one in named)
    assert further.kind is inspect.Parameter.VAR_KEYWORD and further.annotation == "Never"


@pytest.mark.parametrize("name", ["tokenizer", "image_processor", "feature_extractor"])
def test_a_former_argument_of_the_trainer_is_named_by_todays(tmp_path, name):
    with pytest.raises(ArgumentsError, match=f"'{name}'; today it is processing_class") as caught:
        merak.MerakTrainer(Model(), arguments(tmp_path), **{name: object()})
    assert isinstance(caught.value, TypeError)

"""What training scripts do with a trainer, each written once for transformers and for Merak."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import (
    BatchFeature,
    EarlyStoppingCallback,
    FeatureExtractionMixin,
    PretrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutput

from tests.multirank.training import VOCABULARY, Texts, loss_of_logits

Seen = dict[str, Any]
Make = Callable[..., Any]
"""`make(mixin, family=…, arguments={…}, **kwargs)` builds the trainer of either library."""


@dataclass(frozen=True)
class Scenario:
    """One script.

    Args:
        run: builds trainers, uses them and returns what it has seen; of `Make` and a folder that
            all ranks share.
        refused: what Merak's error says where it refuses the script; None where it runs it.
        axes: of the layouts in which it is refused; it runs in the others.
    """

    run: Callable[[Make, Path], Seen]
    refused: str | None = None
    axes: tuple[str, ...] = ("dp", "tp", "pp")


SCENARIOS: dict[str, Scenario] = {}


def scenario(**refusal: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        SCENARIOS[run.__name__] = Scenario(run, **refusal)
        return run

    return add


def trained(trainer: Any, **further: Any) -> Seen:
    """Train, and return what was logged, beside what else was seen."""
    trainer.train()
    return logged(trainer) | further


def logged(trainer: Any) -> Seen:
    history = trainer.state.log_history
    names = ("loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm")
    found = {name: [float(log[name]) for log in history if name in log] for name in names}
    return {**found, "step": trainer.state.global_step, "final": final(trainer)}


def final(trainer: Any) -> Mapping[str, torch.Tensor]:
    """The whole state dict; nothing on ranks other than 0."""
    if hasattr(trainer, "gather_state_dict"):
        return trainer.gather_state_dict()
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


class Stepping(TrainerCallback):
    """Calls a function before every step, or behind it."""

    def __init__(self, before: Any = None, behind: Any = None) -> None:
        self.before, self.behind = before, behind

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.before is not None:
            self.before(state, control, kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.behind is not None:
            self.behind(state, control, kwargs)


class Events(TrainerCallback):
    """Keeps the events that loggers use, with their step and the names of what is logged."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[str]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("train_begin", state.global_step, []))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        # Merak adds its figures to logs of a step, and to no others.
        own = {"loss", "grad_norm", "learning_rate", "epoch"} if "loss" in logs else set(logs)
        self.seen.append(("log", state.global_step, sorted(own & set(logs))))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step, []))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("train_end", state.global_step, []))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.seen.append(("predict", state.global_step, sorted(metrics)))


# ---- callbacks ----


@scenario()
def a_callback_freezes(make: Make, folder: Path) -> Seen:
    def freeze(state: Any, control: Any, kwargs: Any) -> None:
        if state.global_step == 1:
            for name, parameter in kwargs["model"].named_parameters():
                parameter.requires_grad_("mlp" not in name)

    return trained(make(callbacks=[Stepping(freeze)]))


@scenario()
def a_callback_sets_the_learning_rate(make: Make, folder: Path) -> Seen:
    def slow_down(state: Any, control: Any, kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = 1e-3 / (1 + state.global_step)

    return trained(make(callbacks=[Stepping(slow_down)]))


@scenario()
def a_callback_shrinks_the_weights(make: Make, folder: Path) -> Seen:
    @torch.no_grad()
    def shrink(state: Any, control: Any, kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            parameter.mul_(0.9)

    return trained(make(callbacks=[Stepping(behind=shrink)]))


@scenario()
def a_callback_stops_on_every_rank(make: Make, folder: Path) -> Seen:
    def stop(state: Any, control: Any, kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2

    return trained(make(callbacks=[Stepping(behind=stop)]))


@scenario()
def a_callback_stops_by_the_clock_of_one_rank(make: Make, folder: Path) -> Seen:
    trainer = make()
    is_last = trainer.args.process_index == getattr(trainer, "mesh", trainer.args).world_size - 1

    def stop(state: Any, control: Any, kwargs: Any) -> None:
        if is_last and state.global_step == 2:
            time.sleep(0.01)
            control.should_training_stop = True

    trainer.add_callback(Stepping(behind=stop))
    return trained(trainer)


@scenario()
def a_callback_saves_by_the_clock_of_one_rank(make: Make, folder: Path) -> Seen:
    trainer = make(arguments={"output_dir": str(folder)})
    is_first = trainer.args.process_index == 0

    def save(state: Any, control: Any, kwargs: Any) -> None:
        control.should_save = control.should_evaluate = is_first and state.global_step == 2

    trainer.eval_dataset = Texts(8, seed=3)
    trainer.add_callback(Stepping(behind=save))
    seen = trained(trainer)
    return seen | {"folders": sorted(path.name for path in folder.glob("checkpoint-*"))}


@scenario()
def a_callback_switches_modules_to_eval(make: Make, folder: Path) -> Seen:
    def switch(state: Any, control: Any, kwargs: Any) -> None:
        kwargs["model"].gate.training = state.global_step < 1

    return trained(make(model=moded(), callbacks=[Stepping(switch)]))


class Graded(Texts):
    """A dataset that gets harder."""

    level = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        labels = sample["labels"].clone()
        labels[: self.level] = -100
        return {**sample, "labels": labels}


class Harder(TrainerCallback):
    """Makes the dataset of the loader that it is given harder in every epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["train_dataloader"].dataset.level = 3 * round(state.epoch or 0)


@scenario()
def a_callback_changes_the_loaders_dataset(make: Make, folder: Path) -> Seen:
    arguments = {"max_steps": -1, "num_train_epochs": 2}
    return trained(make(arguments=arguments, train_dataset=Graded(16), callbacks=[Harder()]))


@scenario()
def one_process_is_the_main_one(make: Make, folder: Path) -> Seen:
    trainer = make()
    accelerator = trainer.accelerator
    flags = [PartialState().is_main_process, accelerator.is_main_process]
    flags += [accelerator.is_local_main_process, trainer.is_world_process_zero()]
    (folder / str(trainer.args.process_index)).write_text("".join(str(int(f)) for f in flags))
    seen = trained(trainer)  # behind which every rank has written
    written = {file.name: file.read_text() for file in folder.iterdir()}
    ranks = {name for name, found in written.items() if found != "0000"}
    return seen | {"main": sorted(ranks), "flags": written["0"]}


class Gate(nn.Module):
    """Something else in training than in evaluation, as frozen norms are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * (2.0 if self.training else 0.5)


class Moded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first = nn.Linear(16, 16)
        self.gate = Gate()
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.gate(self.first(self.embed(input_ids)))
        logits = self.head(torch.tanh(self.second(x)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def moded() -> nn.Module:
    torch.manual_seed(3)
    return Moded()


NESTED: dict[str, Any] = {"loss": {"scale": 1.0}}


class Scaled(Moded):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] * NESTED["loss"]["scale"]}


@scenario()
def a_callback_changes_an_item_of_a_nested_global(make: Make, folder: Path) -> Seen:
    def scale(state: Any, control: Any, given: Any) -> None:
        NESTED["loss"]["scale"] = 1.0 + state.global_step

    torch.manual_seed(3)
    return trained(make(model=Scaled(), callbacks=[Stepping(before=scale)]))


# ---- overrides ----


class MasksLabels:
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if "labels" in inputs:
            labels = inputs["labels"].clone()
            labels[:, :3] = -100
            inputs = {**inputs, "labels": labels}
        return inputs


@scenario()
def prepare_inputs_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(MasksLabels))


class CountsSteps:
    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["learning_rate"] = logs["learning_rate"] * 2
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


@scenario()
def training_step_and_log_are_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(CountsSteps))


class OwnLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        ) / (40.0 if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@scenario()
def compute_loss_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(OwnLoss, arguments={"max_steps": 2}))


@scenario()
def a_loss_function_is_given(make: Make, folder: Path) -> Seen:
    return trained(make(family="gpt2", compute_loss_func=loss_of_logits))


class OwnSchedule:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer if optimizer is not None else self.optimizer,  # type: ignore[attr-defined]
            lambda step: 1.0 / (1 + step),
        )
        return self.lr_scheduler


@scenario()
def create_scheduler_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(OwnSchedule))


class OwnOptimizer:
    def create_optimizer(self, model: Any = None) -> Any:
        named = list(self.model.named_parameters())  # type: ignore[attr-defined]
        halves = [[p for n, p in named if ("mlp" in n) == is_mlp] for is_mlp in (True, False)]
        groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (1e-2, 1e-3), strict=True)]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer


@scenario()
def create_optimizer_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(OwnOptimizer))


@scenario()
def an_optimizer_class_is_given(make: Make, folder: Path) -> Seen:
    given = (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})
    return trained(make(optimizer_cls_and_kwargs=given))


class OwnTrainLoader:
    def get_train_dataloader(self) -> DataLoader[Any]:
        data: Any = self.train_dataset  # type: ignore[attr-defined]
        return DataLoader(data, 4, collate_fn=default_data_collator)


@scenario()
def get_train_dataloader_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(OwnTrainLoader))


class OwnEvalLoader:
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return DataLoader(Texts(15, seed=3), 4, collate_fn=default_data_collator)


@scenario()
def get_eval_dataloader_is_overridden(make: Make, folder: Path) -> Seen:
    trainer = make(OwnEvalLoader, eval_dataset=Texts(15, seed=3))
    seen = trained(trainer)
    found = trainer.evaluation_loop(trainer.get_eval_dataloader(), "all", False)
    return seen | {"predictions": torch.as_tensor(found.predictions)}


class OwnSampler:
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        generator = torch.Generator().manual_seed(1)
        weights = [1.0 + i % 3 for i in range(32)]
        return WeightedRandomSampler(weights, 32, generator=generator)


@scenario()
def the_sampler_is_overridden(make: Make, folder: Path) -> Seen:
    return trained(make(OwnSampler))


# ---- models ----


@scenario()
def a_model_init_copies_weights(make: Make, folder: Path) -> Seen:
    def build() -> nn.Module:
        source, made = moded(), Moded()
        with torch.no_grad():
            for to, given in zip(made.parameters(), source.parameters(), strict=True):
                to.copy_(given / 2)
        return made

    return trained(make(model_init=build))


class WaveConfig(PretrainedConfig):
    model_type = "wave"


class Wave(PreTrainedModel):
    """A model of one's own, whose main input is not ids."""

    config_class = WaveConfig
    main_input_name = "signal"

    def __init__(self, config: WaveConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.post_init()

    def forward(self, signal: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        for layer in self.layers:
            signal = torch.tanh(layer(signal))
        loss = None if labels is None else nn.functional.mse_loss(signal, labels)
        return CausalLMOutput(loss=loss, logits=signal)


class Unnamed(Wave):
    """The same, which does not say what its main input is."""

    main_input_name = "input_ids"


class Waves(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        signal = torch.sin(torch.arange(8) * (1.0 + index))
        return {"signal": signal, "labels": signal.roll(1)}


def wave(cls: type[Wave]) -> Wave:
    torch.manual_seed(3)
    return cls(WaveConfig())


@scenario()
def the_main_input_is_no_ids(make: Make, folder: Path) -> Seen:
    made = make(model=wave(Wave), train_dataset=Waves(), eval_dataset=Waves())
    return trained(made) | {"evaluated": made.evaluate()["eval_loss"]}


@scenario()
def the_main_input_is_not_named(make: Make, folder: Path) -> Seen:
    made = make(model=wave(Unnamed), train_dataset=Waves(), eval_dataset=Waves())
    return trained(made) | {"evaluated": made.evaluate()["eval_loss"]}


class Embedded(Texts):
    """Embeddings in place of ids."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        ids = sample.pop("input_ids")
        sample["inputs_embeds"] = torch.sin(ids[:, None] * (1.0 + torch.arange(32)))
        return sample


@scenario()
def embeddings_take_the_place_of_ids(make: Make, folder: Path) -> Seen:
    return trained(make(train_dataset=Embedded(32)))


@scenario()
def a_second_trainer_has_the_first_ones_model(make: Make, folder: Path) -> Seen:
    first = make()
    seen = trained(first)
    again = trained(make(model=first.model, arguments={"learning_rate": 1e-3}))
    return {"first": seen["loss"], **again}


# ---- saving ----


class Extractor(FeatureExtractionMixin):
    """A processor of one's own."""

    def __init__(self, rate: int = 7, **kwargs: Any) -> None:
        self.rate = rate
        super().__init__(**kwargs)

    def __call__(self, values: Any) -> BatchFeature:
        return BatchFeature({"values": values})


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@scenario()
def a_feature_extractor_is_saved(make: Make, folder: Path) -> Seen:
    arguments = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2}
    trainer = make(
        arguments=arguments, processing_class=Extractor(), data_collator=default_data_collator
    )
    seen = trained(trainer)
    trainer.save_model(str(folder / "model"))
    rates = [
        json.loads((folder / name / "preprocessor_config.json").read_text())["rate"]
        for name in ("checkpoint-2", "model")
    ]
    return seen | {"rates": rates}


@scenario()
def the_best_checkpoint_is_loaded(make: Make, folder: Path) -> Seen:
    return _best(make, folder)


@scenario()
def the_best_checkpoint_has_only_a_model(make: Make, folder: Path) -> Seen:
    return _best(make, folder, save_only_model=True)


def _best(make: Make, folder: Path, **further: Any) -> Seen:
    arguments = {
        "output_dir": str(folder), "save_strategy": "steps", "save_steps": 1, "eval_steps": 1,
        "eval_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 1,
        **further,
    }  # fmt: skip
    trainer = make(arguments=arguments, eval_dataset=Texts(8, seed=3))
    seen = trained(trainer)
    best = Path(trainer.state.best_model_checkpoint).name
    return seen | {"best": best, "evaluated": trainer.evaluate()["eval_loss"]}


@scenario()
def what_is_saved_is_read_at_once(make: Make, folder: Path) -> Seen:
    trainer = make()
    seen = trained(trainer)
    trainer.save_model(str(folder))
    read = type(trainer.model).from_pretrained(folder)
    return seen | {"read": {n: t.clone() for n, t in read.state_dict().items()}}


@scenario()
def a_training_is_resumed(make: Make, folder: Path) -> Seen:
    arguments = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2}
    trained(make(arguments={**arguments, "max_steps": 2}))
    trainer = make(arguments={**arguments, "lr_scheduler_type": "constant"})
    trainer.train(resume_from_checkpoint=True)
    return logged(trainer)


# ---- evaluation ----


def accuracy(found: Any) -> dict[str, float]:
    right = found.predictions == found.label_ids
    return {"accuracy": float(right.mean())}


def to_words(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


@scenario()
def metrics_are_computed(make: Make, folder: Path) -> Seen:
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer = make(
        arguments=arguments,
        eval_dataset=Texts(9, seed=3),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=to_words,
    )
    return trained(trainer)


@scenario()
def training_stops_early(make: Make, folder: Path) -> Seen:
    arguments = {
        "output_dir": str(folder), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    return trained(
        make(
            arguments=arguments,
            eval_dataset=Texts(8, seed=3),
            callbacks=[
                EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=9.0)
            ],
        )
    )


@scenario()
def two_datasets_are_evaluated(make: Make, folder: Path) -> Seen:
    both = {"one": Texts(6, seed=3), "two": Texts(7, seed=4)}
    trainer = make(eval_dataset=both)
    seen = trained(trainer)
    return seen | {f"of {k}": v for k, v in trainer.evaluate().items() if k.endswith("_loss")}


@scenario()
def samples_are_predicted(make: Make, folder: Path) -> Seen:
    trainer = make()
    seen = trained(trainer)
    found = trainer.predict(Texts(7, seed=3))
    return seen | {"predictions": torch.as_tensor(found.predictions)}


@scenario()
def loggers_get_every_event(make: Make, folder: Path) -> Seen:
    """Loggers of a run open, fill and close it by these: W&B's summary, MLflow's run."""
    events = Events()
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "skip_memory_metrics": True}
    trainer = make(arguments=arguments, eval_dataset=Texts(8, seed=3), callbacks=[events])
    seen = trained(trainer)
    trainer.evaluate()
    trainer.predict(Texts(7, seed=3))
    return seen | {"events": events.seen}


# ---- arguments ----


@scenario()
def accelerate_is_configured(make: Make, folder: Path) -> Seen:
    config = {
        "even_batches": False,
        "non_blocking": True,
        "use_seedable_sampler": False,
        "dispatch_batches": False,
    }
    return trained(make(arguments={"accelerator_config": config}))


@scenario(refused="split_batches=True cannot be honoured", axes=("dp",))
def accelerate_splits_batches(make: Make, folder: Path) -> Seen:
    return trained(make(arguments={"accelerator_config": {"split_batches": True}}))


@scenario()
def gradients_are_reduced_for_every_batch(make: Make, folder: Path) -> Seen:
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return trained(make(arguments={"accelerator_config": config}))


@scenario(refused="enable_jit_checkpoint=True cannot be honoured")
def checkpoints_are_saved_just_in_time(make: Make, folder: Path) -> Seen:
    return trained(make(arguments={"enable_jit_checkpoint": True}))


@scenario()
def checkpointing_is_asked_for(make: Make, folder: Path) -> Seen:
    return trained(make(arguments={"activation_checkpointing": True}))


@scenario()
def segments_are_compiled(make: Make, folder: Path) -> Seen:
    arguments = {"torch_compile_backend": "aot_eager"}
    trainer = make(arguments=arguments, eval_dataset=Texts(8, seed=3))
    seen = trained(trainer)
    return seen | {"evaluated": trainer.evaluate()["eval_loss"]}


@scenario(refused="auto_find_batch_size=True cannot be honoured with more than one rank")
def memory_decides_the_batch(make: Make, folder: Path) -> Seen:
    return trained(make(arguments={"auto_find_batch_size": True}))


@scenario()
def gradients_are_clipped_over_epochs(make: Make, folder: Path) -> Seen:
    arguments = {"max_grad_norm": 0.1, "max_steps": -1, "num_train_epochs": 2}
    return trained(make(arguments=arguments, train_dataset=Texts(13)))


@scenario()
def labels_are_smoothed(make: Make, folder: Path) -> Seen:
    trainer = make(arguments={"label_smoothing_factor": 0.2}, eval_dataset=Texts(8, seed=3))
    seen = trained(trainer)
    return seen | {"evaluated": trainer.evaluate()["eval_loss"]}


class MeanLoss:
    """A mean over each microbatch, which the trainer is to divide by their number."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@scenario()
def a_loss_is_a_mean(make: Make, folder: Path) -> Seen:
    return trained(make(MeanLoss, arguments={"max_steps": 2}))

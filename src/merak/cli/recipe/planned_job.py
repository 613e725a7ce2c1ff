"""Job of a recipe for commands that read none of its data: `--model` may name a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from merak.arguments.draft import DraftArguments
from merak.arguments.fields import AutoBatch
from merak.arguments.planned import pinned_arguments, step_samples
from merak.cli.recipe.data.tokenizer import tokenizer_name
from merak.cli.recipe.draft import draft_of
from merak.cli.recipe.model import TOKEN_IDS, with_adapters
from merak.cli.recipe.recipe import model_of, names_recipe, read_recipe
from merak.cli.recipe.schema import COLUMNS, IMAGES, TRAIN_TOKENIZER, ModelRecipe, Recipe
from merak.cli.recipe.trainings.formats import known_training
from merak.core.elastic import AUTO_PLAN, GivenDegrees
from merak.core.errors import CommandError
from merak.core.health.stderr import write_line
from merak.core.mesh import Mesh
from merak.engine.layer_dropping import drop_layers
from merak.graph.weights.empty_weights import empty_weights
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.engine_options import EngineOptions
from merak.plan.options import LAYOUT, PARALLEL_OPTIONS, common_options
from merak.plan.price.candidate import option_values
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource, resolve_model
from merak.zoo.workload import reads_sequence

_UNPRICED = {
    "segment_times": "seconds that were measured elsewhere",
    "memory_budget": "a memory other than the devices'",
    "host_bytes_per_s": "a rate other than the devices'",
}
"""Options of a recipe that no price of devices can take, and what they are."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Job of a recipe, of which no data is read.

    Args:
        name: of the recipe, as it was named.
        recipe: it may lack the source of its data.
    """

    name: str
    recipe: Recipe

    @property
    def model(self) -> ModelRecipe:
        """The model, with vocabulary and special tokens of the tokenizer that the recipe trains."""
        own, data = self.recipe.model, self.recipe.data
        is_stored = Path(own.name).expanduser().exists()
        if is_stored or not self.trains_tokenizer:
            return own
        default = model_of(replace(own, config={})).config
        ids = [(name, getattr(default, name, None)) for name in TOKEN_IDS]
        outside = {n: 0 for n, id_ in ids if isinstance(id_, int) and id_ >= data.vocabulary}
        return replace(own, config={"vocab_size": data.vocabulary, **outside, **own.config})

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the recipe trains a tokenizer: its model reads text, and none is named."""
        own, data = self.recipe.model, self.recipe.data
        if data.format in (IMAGES, COLUMNS):
            return False
        return tokenizer_name(data, own.name) == TRAIN_TOKENIZER and _reads_text(own)

    def draft(self, device: torch.device, devices: Iterable[DeviceProfile] = ()) -> JobDraft:
        """Return the job's arguments, checked as its ranks check them.

        Args:
            device: that the ranks compute on, or that this process is to take for it.
            devices: that are planned for and need not be here; none for `device`.

        Raises:
            MerakError: one cannot be honoured; the message begins with its place in the recipe.
        """
        with self.recipe.origins.located():
            rates = [own.flops_per_s for own in devices]
            has_bf16 = all("bfloat16" in own for own in rates) if rates else None
            mesh, args = draft_of(self.recipe, device, self.recipe.parallel.num_ranks, has_bf16)
        return JobDraft(self, mesh, args)

    def samples(self, source: ModelSource) -> dict[str, Any]:
        """Return what fields of a request say of the samples, and of the parameters.

        Args:
            source: the model.
        """
        found: dict[str, Any] = {}
        if reads_sequence(source) and self.recipe.data.format != COLUMNS:
            found["sequence"] = self.recipe.data.sequence
        usual = "float32" if source.weights is None else source.dtype
        return found | {"dtype": self.recipe.model.dtype or usual}

    def sample(self, source: ModelSource, sequence: int | None) -> str:
        """Return a sentence on the samples that stand for those of the data.

        Args:
            source: the model.
            sequence: tokens of a sequence, as they are taken; None for the model's own.
        """
        data, begin = self.recipe.data, f"{self.name}: no data is read; samples are taken to "
        if not reads_sequence(source):
            classes = getattr(source.config, "num_labels", None)
            return (
                f"{begin}have the size that the config of {source.name} says, and {classes} "
                "classes: --set model.config.num_labels=N for those of your data"
            )
        tokens = "the model's longest, up to 512" if sequence is None else f"{sequence:,}"
        if data.format == COLUMNS:
            return f"{begin}have {tokens} tokens: --seq for the length of your own"
        spans = getattr(source.config, "is_encoder_decoder", False)
        more = (
            " for the encoder and as many for the decoder, more than spans leave" if spans else ""
        )
        words = f", of {data.vocabulary:,} entries" if self.trains_tokenizer else ""
        return f"{begin}have {tokens} tokens{more}{words}"


def planned_job(name: str, changes: Sequence[str] = ()) -> PlannedJob | None:
    """Return the job of a recipe; None where the name is of something else.

    Args:
        name: as `--model`: a recipe (.yaml), or the name of one that comes with Merak.
        changes: of its fields, such as `arguments.zero=1`.

    Raises:
        CommandError: the recipe is wrong, or there is none to change.
    """
    if names_recipe(name):
        recipe = read_recipe(name, changes, needs_data=False)
        if training := known_training(recipe):
            raise CommandError(
                f"{name} trains on {training.what}, of which {training.trainer} makes "
                "samples and loss; no command before it knows them. merak train with --dry-run "
                "checks the recipe."
            )
        return PlannedJob(name, recipe)
    if changes:
        raise CommandError(
            f"--set {changes[0]} changes a field of a recipe, but --model {name} names none; use "
            "--config for fields of a model."
        )
    return None


def _reads_text(model: ModelRecipe) -> bool:
    source = resolve_model(model.name, trust_remote_code=model.trust_remote_code)
    return source.model_class.main_input_name == "input_ids"


@dataclass(frozen=True, slots=True)
class JobDraft:
    """Arguments of a recipe's job, as fields of the requests of commands.

    Args:
        job: of the recipe.
        mesh: of its ranks, which are not there.
        args: its training arguments.
    """

    job: PlannedJob
    mesh: Mesh
    args: DraftArguments

    @property
    def is_planned(self) -> bool:
        """Whether the job itself searches its layout."""
        return self.job.recipe.plan == AUTO_PLAN

    def optimizer(self) -> OptimizerFactory:
        """Factory of the job's optimizer, for the forecast of its memory."""
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args)
        return lambda parameters: cls(parameters, **kwargs)

    def options(self) -> dict[str, Any]:
        """The options of the engine, by name."""
        found = {name: getattr(self.args, name) for name in PARALLEL_OPTIONS}
        return found | {"feature_dict": found["feature_dict"] or None}

    def give_options(self, workload: Workload) -> None:
        """Set the job's options and adapters on a workload.

        Args:
            workload: of the job's model; changed in place.

        Raises:
            TraceError: the model has no blocks to drop.
        """
        options, recipe = EngineOptions(**self.options()), self.job.recipe
        if recipe.lora is not None:
            with empty_weights():
                model = with_adapters(workload.model, recipe, model_of(recipe.model))
            workload.source = replace(workload.source, model=model)
        drop_layers(workload.source, options)
        workload.features = options.features
        if options.layer_keep < 1:
            write_line(
                f"merak: {self.job.name}: layer_keep={options.layer_keep} drops sublayers by "
                "chance; time and memory are those of steps in which all run."
            )

    def pinned(self) -> dict[str, Any]:
        """Fields of a request to search a layout: what the job itself would keep.

        Degrees and the microbatch belong to a layout: they are kept where the job searches the
        rest, and left to the search where the recipe gives all of them.
        """
        found = pinned_arguments(self.args, self.mesh)
        layout = {name: getattr(found, name) for name in (*GivenDegrees._fields, "microbatch")}
        kept = {name: getattr(found, name) for name in LAYOUT}
        kept["global_batch"] = step_samples(self.args, self.mesh)
        return self._shared() | kept | (layout if self.is_planned else {})

    def laid_out(self) -> dict[str, Any]:
        """Fields of a request about one layout: the recipe's, with 1 for degrees that it lacks."""
        args, own = self.args, self.job.recipe.parallel
        batch = args.per_device_train_batch_size
        is_open = isinstance(batch, AutoBatch)
        sizes = {} if is_open else {"batch": int(batch), "microbatch": int(batch)}
        if not self.is_planned:
            count = args.gradient_accumulation_steps
            sizes |= {"microbatches": count, "global_batch": step_samples(args, self.mesh)}
        kept = {name: getattr(args, name) for name in PARALLEL_OPTIONS}
        kept |= option_values(kept)
        return self._shared() | kept | sizes | own.axes() | {"ep": own.ep or 1}

    def _shared(self) -> dict[str, Any]:
        casts = self.args.autocast
        common = common_options(self.args).priced()
        return common | {"autocast": None if casts is None else str(casts).removeprefix("torch.")}

    def refuse_unpriced(self, command: str) -> None:
        """Refuse options that a command which prices devices cannot take.

        Args:
            command: such as "merak plan".

        Raises:
            CommandError: the recipe has one.
        """
        for name, what in _UNPRICED.items():
            value = getattr(self.args, name)
            if value is not None:
                raise CommandError(
                    f"{command} cannot price {name}={value!r} of {self.job.name}, {what}; leave it "
                    f"out with --set arguments.{name}=null."
                )

"""Training job of a recipe, as every rank of `merak train` runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    default_data_collator,
)
from transformers.models.auto import modeling_auto as auto
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import merak
from merak.arguments.draft import DraftArguments
from merak.arguments.folders import make_output_folder
from merak.cli.recipe.corpus import Corpus, check_tokenizer, pack_corpus
from merak.cli.recipe.recipe import DataRecipe, Recipe
from merak.cli.recipe.report import TrainReport
from merak.cli.recipe.texts import Texts, find_source
from merak.core.announce import announced, show_announcements
from merak.core.elastic import AUTO_PLAN, Degrees, GivenDegrees, check_expert_degree
from merak.core.mesh import Mesh, current_mesh, pretended
from merak.launch.devices import check_backend, device_of
from merak.launch.errors import CommandError
from merak.trainer.resuming import AUTO, checkpoint_to_resume
from merak.trainer.unsupported import refuse_no_steps
from merak.zoo.configs.fields import most_positions
from merak.zoo.model_source import ModelSource, check_inner_fields, resolve_model

HELD_OUT_SPLITS = ("validation", "eval", "test")
"""Splits of a saved dataset that are evaluated with, the first that is there."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config that a fresh model takes from its tokenizer."""


@dataclass(frozen=True, slots=True)
class Job:
    """Recipe, and the device and backend of its run.

    Args:
        recipe: what is trained.
        backend: "gloo" or "nccl"; None for what fits the device.
        device: "cpu" or "cuda"; None for what the machine has.
        resumes: whether it goes on from the newest checkpoint of the run, if there is one.
    """

    recipe: Recipe
    backend: str | None
    device: str | None
    resumes: bool = False


def check_job(job: Job) -> None:
    """Check all of a recipe as ranks would, before they are started.

    Raises:
        MerakError: something in it is wrong; what only the data can tell is not looked at.
    """
    recipe = job.recipe
    device = device_of(job.device)
    check_backend(job.backend, device)
    ranks = num_ranks(job)
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise CommandError(
            f"the recipe's degrees need {ranks} GPUs, but here are "
            f"{torch.cuda.device_count()}; lower them, or start ranks on several nodes with "
            "torchrun."
        )
    source = resolve_model(
        recipe.model.name,
        recipe.model.config,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    check_inner_fields(source.config, recipe.model.config)
    degrees = recipe.parallel.axes()
    ep = check_expert_degree(recipe.parallel.ep, Degrees(**degrees))
    axes = degrees["dp"], degrees["tp"], degrees["pp"]
    mesh = Mesh(*axes, rank=0, device=device, device_mesh=None, cp=degrees["cp"], ep=ep)
    if recipe.plan == AUTO_PLAN:
        given = GivenDegrees(recipe.parallel.dp, recipe.parallel.tp, recipe.parallel.pp)
        given.check_ranks(ranks)
        mesh = replace(mesh, dp=ranks, tp=1, pp=1, given=given)
    with pretended(mesh):
        args = DraftArguments(**_settings(recipe))
    refuse_no_steps(args)
    checkpoint_to_resume(
        args.resume_from_checkpoint,
        str(args.output_dir),
        allow_pickled=args.allow_pickled_checkpoint,
        reads_all=False,
    )
    make_output_folder(str(args.output_dir))
    check_tokenizer(recipe.data)
    if isinstance(find_source(recipe.data), Texts):
        _check_text(source, recipe.data)
        if args.eval_strategy != "no" and not recipe.data.held_out:
            wanted = recipe.arguments["eval_strategy"]
            raise CommandError(
                f"eval_strategy={wanted!r} has nothing to evaluate with, since data.held_out is 0; "
                "hold a share of the texts out, or use 'no'."
            )
    if source.weights is None:
        with merak.empty_weights():
            source.build()


def num_ranks(job: Job) -> int:
    """Number of ranks to start for a job: with `plan: auto`, one on every GPU of this machine.

    Args:
        job: the recipe, and its device.
    """
    own = job.recipe.parallel
    if job.recipe.plan != AUTO_PLAN or own.ranks is not None:
        return own.num_ranks
    on_gpus = device_of(job.device).type == "cuda"
    return torch.cuda.device_count() if on_gpus else own.num_ranks


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the training settings of a recipe as `MerakArguments` takes them."""
    # Throughput is measured in input tokens, so they are counted unless the recipe says no.
    return {"include_num_input_tokens_seen": "all", **recipe.arguments}


def run_job(job: Job) -> TrainReport | None:
    """Train; a collective of all ranks.

    Returns:
        How it ended, on rank 0; None elsewhere.

    Raises:
        MerakError: something in the recipe does not fit.
    """
    recipe = job.recipe
    show_announcements()
    source = resolve_model(
        recipe.model.name,
        recipe.model.config,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    wanted = recipe.parallel
    merak.init(
        wanted.dp,
        wanted.tp,
        wanted.pp,
        cp=wanted.cp,
        ep=wanted.ep,
        backend=job.backend,
        device=job.device,
        elastic=wanted.elastic,
        plan=AUTO_PLAN if recipe.plan == AUTO_PLAN else None,
    )
    args = merak.MerakArguments(**_settings(recipe))
    with announced(f"reading {recipe.data.source}"):
        corpus = _corpus(recipe, source, args.seed)
    if corpus.tokenizer is not None:
        source = _fit_to_tokenizer(source, recipe, corpus.tokenizer)
    clock = _Clock()
    trainer = merak.MerakTrainer(
        model=_build(source),
        args=args,
        train_dataset=corpus.train,
        eval_dataset=corpus.held_out,
        processing_class=corpus.tokenizer,
        data_collator=_collator(source, corpus),
        callbacks=[clock],
    )
    trained = trainer.train(resume_from_checkpoint=_to_resume(job, args))
    held_out_loss = None if corpus.held_out is None else trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if current_mesh().rank != 0:
        return None
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = trained.metrics["train_runtime"]
    return TrainReport(
        loss=history[-1] if history else trained.training_loss,
        steps=trained.global_step,
        tokens_per_second=clock.num_tokens(trainer.state) / seconds,
        checkpoint=str(args.output_dir),
        eval_loss=held_out_loss,
        seconds=seconds,
    )


def _to_resume(job: Job, args: Any) -> Any:
    """The request to resume: the recipe's own, until a restart or --resume finds a later one."""
    requested = args.resume_from_checkpoint
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not job.resumes or (requested and not is_restart):
        return requested
    has_any = any(Path(str(args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    return AUTO if has_any else requested


class _Clock(TrainerCallback):
    """Callback that records the number of tokens before this run, which may be a resumed one."""

    def __init__(self) -> None:
        self._tokens_before = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        self._tokens_before = state.num_input_tokens_seen

    def num_tokens(self, state: TrainerState) -> int:
        """Return the number of input tokens that this run has trained on."""
        return int(state.num_input_tokens_seen) - self._tokens_before


def _corpus(recipe: Recipe, source: ModelSource, seed: int) -> Corpus:
    found = find_source(recipe.data)
    if isinstance(found, Texts):
        texts, held_out = found, None
    elif source.model_class.main_input_name in found["train"].column_names:
        return _as_it_is(found, recipe.data, seed)
    else:
        texts, held_out = _texts_of(found, recipe.data, source)
    _check_text(source, recipe.data)
    return pack_corpus(texts, held_out, recipe.data, recipe.output_dir / "data")


def _as_it_is(found: datasets.DatasetDict, recipe: DataRecipe, seed: int) -> Corpus:
    held_out = _held_out_split(found)
    if held_out is not None or recipe.held_out == 0:
        return Corpus(found["train"], held_out, None)
    # In memory: ranks that write one cache file at once would spoil it.
    parts = found["train"].train_test_split(recipe.held_out, seed=seed, keep_in_memory=True)
    return Corpus(parts["train"], parts["test"], None)


def _texts_of(
    found: datasets.DatasetDict, recipe: DataRecipe, source: ModelSource
) -> tuple[Texts, Texts | None]:
    columns = found["train"].column_names
    if recipe.column not in columns:
        raise CommandError(
            f"the dataset {recipe.source} has the columns {', '.join(columns)}; {source.name} "
            f"takes {source.model_class.main_input_name}, and text is expected in "
            f"{recipe.column!r}: set data.column."
        )
    held_out = _held_out_split(found)
    texts = Texts((), recipe.column, found["train"])
    return texts, None if held_out is None else Texts((), recipe.column, held_out)


def _held_out_split(found: datasets.DatasetDict) -> datasets.Dataset | None:
    return next((found[name] for name in HELD_OUT_SPLITS if name in found), None)


def _is_causal(source: ModelSource) -> bool:
    return source.name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _is_masked(source: ModelSource) -> bool:
    return source.name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def _collator(source: ModelSource, corpus: Corpus) -> Any:
    """Make the collator of packed text; a dataset keeps transformers' default."""
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        return None
    # Some models are in both lists; those predict what follows.
    if _is_causal(source):
        return default_data_collator
    if tokenizer.mask_token is None:
        raise CommandError(
            f"{source.name} fills gaps, but the tokenizer has no mask token; train one with "
            "data.tokenizer: train, or name one that has."
        )
    return DataCollatorForLanguageModeling(tokenizer)


def _fit_to_tokenizer(
    source: ModelSource, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """Fit a new model to the tokenizer's vocabulary; a stored one must be large enough."""
    given = recipe.model.config
    if not Path(recipe.model.name).expanduser().exists():
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS if hasattr(source.config, name)}
        source = resolve_model(recipe.model.name, {"vocab_size": len(tokenizer), **ids, **given})
    config = source.config.get_text_config()
    if config.vocab_size < len(tokenizer):
        raise CommandError(
            f"the tokenizer has {len(tokenizer)} entries, but {source.name} has "
            f"vocab_size={config.vocab_size}; leave model.config.vocab_size out, or lower "
            "data.vocabulary."
        )
    return source


def _check_text(source: ModelSource, recipe: DataRecipe) -> None:
    """Refuse text for a model that is not trained on text, or not at its length."""
    if not (_is_causal(source) or _is_masked(source)):
        raise CommandError(
            f"{source.name} is trained neither to continue text nor to fill gaps in it; give a "
            "saved dataset with the columns that it takes, or use a causal or masked language "
            "model."
        )
    _check_positions(source, recipe)


def _check_positions(source: ModelSource, recipe: DataRecipe) -> None:
    limit = most_positions(source.config)
    if limit is not None and limit[1] < recipe.sequence:
        raise CommandError(
            f"data.sequence={recipe.sequence} is more than the {limit[1]} positions of "
            f"{source.name}; shorten it, or set model.config.{limit[0]}."
        )


def _build(source: ModelSource) -> PreTrainedModel:
    with merak.empty_weights():
        if source.weights is None:
            return source.build()
        model: PreTrainedModel = source.model_class.from_pretrained(
            source.weights, config=source.config
        )
        return model

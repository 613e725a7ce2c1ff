"""Training job of a recipe, as every rank of `merak train` runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

import merak
from merak.arguments.folders import make_output_folder
from merak.cli.recipe.data.tokenizer import check_tokenizer, tokenizer_name
from merak.cli.recipe.draft import draft_of
from merak.cli.recipe.parts import check_data, make_parts
from merak.cli.recipe.planned_job import PlannedJob
from merak.cli.recipe.recipe import model_of
from merak.cli.recipe.report import DryRunReport, TrainReport
from merak.cli.recipe.schema import Recipe
from merak.core.announce import show_announcements
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import CommandError, MerakError, collected, raise_all
from merak.core.mesh import current_mesh
from merak.launch.devices import check_backend, device_of
from merak.launch.ranks import check_room
from merak.trainer.checkpoints.resuming import AUTO, checkpoint_to_resume, checkpoints_in
from merak.trainer.unsupported import refuse_no_steps
from merak.zoo.hub import fetch_model
from merak.zoo.model_source import check_inner_fields


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


def fetched(recipe: Recipe) -> Recipe:
    """The recipe with the folder of its model, which is fetched where it is one of the hub.

    Raises:
        CommandError: there is no such model.
    """
    with recipe.origins.located():
        if not isinstance(model_of(recipe.model).weights, str):
            return recipe
        folder = fetch_model(recipe.model.name)
    return replace(recipe, model=replace(recipe.model, name=str(folder)))


def check_job(job: Job) -> None:
    """Check all of a recipe as ranks would, before they are started.

    Raises:
        MerakError: something in it is wrong; what only the data can tell is not looked at.
    """
    with job.recipe.origins.located():
        _check(job)


def _check(job: Job) -> None:
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
    check_room(ranks)
    problems: list[MerakError] = []
    with collected(problems):
        _check_arguments(recipe, device, ranks)
    with collected(problems):
        check_tokenizer(tokenizer_name(recipe.data, recipe.model.name))
    with collected(problems):
        source = model_of(recipe.model)
        with collected(problems):
            check_data(recipe, source)
        check_inner_fields(source.config, recipe.model.config)
        if source.weights is None:
            with merak.empty_weights():
                source.build()
    raise_all(problems)


def _check_arguments(recipe: Recipe, device: torch.device, ranks: int) -> None:
    _, args = draft_of(recipe, device, ranks)
    refuse_no_steps(args)
    _found_checkpoint(args.resume_from_checkpoint, args)
    make_output_folder(str(args.output_dir))


def _found_checkpoint(request: Any, args: Any) -> str | None:
    """The checkpoint that a job would go on from, of which only what is quick is checked."""
    allows = args.allow_pickled_checkpoint
    folder = str(args.output_dir)
    return checkpoint_to_resume(
        request, folder, url=args.checkpoint_url, allow_pickled=allows, reads_all=False
    )


def described(job: Job) -> DryRunReport:
    """What a job would do that is not started.

    A tokenizer that is still to be trained has as many entries as the recipe allows it.

    Args:
        job: that `check_job` has checked.
    """
    recipe, own, device = job.recipe, job.recipe.parallel, device_of(job.device)
    source = model_of(PlannedJob("", recipe).model)
    with merak.empty_weights():
        parameters = sum(one.numel() for one in source.build().parameters())
    degrees: dict[str, int | None] = {**own.axes(), "ep": own.ep or 1}
    if recipe.plan == AUTO_PLAN:
        degrees = {axis: getattr(own, axis) for axis in degrees}
    _, args = draft_of(recipe, device, num_ranks(job))
    return DryRunReport(
        model=source.model_class.__name__,
        parameters=parameters,
        data=recipe.data.name,
        ranks=num_ranks(job),
        degrees=degrees,
        device=device.type,
        output_dir=str(recipe.output_dir),
        checkpoint=_found_checkpoint(_to_resume(job, args), args),
    )


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


def run_job(job: Job) -> TrainReport | None:
    """Train; a collective of all ranks.

    Returns:
        How it ended, on rank 0; None elsewhere.

    Raises:
        MerakError: something in the recipe does not fit.
    """
    show_announcements()
    with job.recipe.origins.located():
        return _run(job)


def _run(job: Job) -> TrainReport | None:
    recipe, wanted = job.recipe, job.recipe.parallel
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
    parts = make_parts(recipe)
    args, corpus = parts.args, parts.corpus
    clock = _Clock()
    trainer = parts.make_trainer(callbacks=[clock])
    trained = trainer.train(resume_from_checkpoint=_to_resume(job, args))
    trainer.save_model()  # before an evaluation can fail
    held_out_loss = None if corpus.held_out is None else trainer.evaluate()["eval_loss"]
    if current_mesh().rank != 0:
        return None
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds, has_tokens = trained.metrics["train_runtime"], trainer.throughput.counts_tokens
    return TrainReport(
        loss=history[-1] if history else trained.training_loss,
        steps=trained.global_step,
        tokens_per_second=clock.num_tokens(trainer.state) / seconds if has_tokens else None,
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
    has_any = checkpoints_in(args.checkpoint_url or str(args.output_dir))
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

"""The plan of a trainer's job, before its engine is built: searched, or followed from a file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from merak.arguments import MerakArguments, argument_problem
from merak.arguments.planned import (
    chooses_microbatch,
    chooses_plan,
    given_layout,
    pinned_arguments,
    set_layout,
    set_microbatch,
    step_samples,
)
from merak.core.announce import announce
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import ArgumentsError, DataError
from merak.core.mesh import Mesh, current_mesh
from merak.core.rank0 import warn_on_rank0
from merak.core.start.init import lay_out
from merak.data import check_not_empty, longest_batch
from merak.engine.planning.choose import Job, choose_microbatch, choose_plan
from merak.engine.planning.devices import devices_here
from merak.engine.planning.replan import PlanWatch, Replanner
from merak.engine.planning.shapes import samples_of, tokens_of
from merak.graph.tensor_parallel.features import parse_features
from merak.plan.options import common_options
from merak.plan.price.candidate import Candidate
from merak.plan.price.workload import Workload
from merak.plan.search.plan_file import (
    job_differences,
    optimizer_name,
    read_plan,
    refuse_other_model,
)
from merak.plan.search.space import MOST_MICROBATCH
from merak.trainer.columns import check_batch
from merak.trainer.last_step import refuse_unequal_replicas
from merak.trainer.optimizer_like import similar_optimizer
from merak.trainer.subclass.methods import overriding
from merak.trainer.subclass.traced_loss import in_first_step
from merak.trainer.unsupported import steps_beside_backward

_ADVICE = "replan=True goes on in it behind the next checkpoint"

logger = logging.getLogger(__name__)


def plan_training(trainer: Any) -> PlanWatch | None:
    """Choose what the arguments leave to be chosen, and lay the ranks out; a collective.

    Args:
        trainer: a `MerakTrainer` whose model, data and arguments are there.

    Returns:
        What compares a plan that was searched with its first steps; None where none was.

    Raises:
        ArgumentsError: there is nothing to train on.
        MerakError: the model cannot be traced, or no plan fits.
    """
    args, mesh = trainer.args, current_mesh()
    if not chooses_plan(args) and not chooses_microbatch(args):
        return None
    samples = step_samples(args, mesh)
    if not chooses_plan(args) and samples % mesh.dp:
        raise ArgumentsError(
            f"global_batch={samples} cannot be shared out over dp={mesh.dp} replicas; use a "
            f"multiple of {mesh.dp}."
        )
    cache = Path(args.trace_cache) if args.trace_cache else None
    workload = _workload(trainer, samples)
    cluster = devices_here(mesh, args.cluster, cache, args.memory_budget)
    job = Job(workload, cluster, _Refusal(args, trainer.train_dataset, mesh).reason)
    with in_first_step(trainer, _loader(trainer, samples), is_planned=True):
        if chooses_plan(args):
            pinned = pinned_arguments(args, mesh)
            chosen = choose_plan(mesh, job, pinned)
        else:
            set_microbatch(args, choose_microbatch(mesh, job, given_layout(args, mesh)))
            return None
    args.gradient_compression = workload.common.gradient_compression
    set_plan(args, chosen)
    return PlanWatch(Replanner(job, pinned, chosen, args.replan, _ADVICE))


def set_plan(args: MerakArguments, layout: Candidate) -> None:
    """Lay the ranks out in a layout that was searched, and set its arguments; a collective.

    Args:
        args: of the job.
        layout: that was searched.
    """
    lay_out(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep)
    set_layout(args, layout)


def plans_later(trainer: Any) -> bool:
    """Whether the loss may read what a subclass sets behind the constructor of `MerakTrainer`.

    Args:
        trainer: a `MerakTrainer`.
    """
    own_constructor = overriding(trainer, "__init__")
    return own_constructor is not None and overriding(trainer, "compute_loss") is not None


def _workload(trainer: Any, samples: int) -> Workload:
    """The trainer's model at the shapes of its first samples."""
    if trainer.train_dataset is None:
        raise ArgumentsError(
            "'auto' for plan or per_device_train_batch_size is chosen for training, and there is "
            "nothing to train on; pass train_dataset=… to MerakTrainer, or give the layout."
        )
    check_not_empty(trainer.train_dataset)
    args, mesh = trainer.args, current_mesh()
    batch = _first_samples(trainer)
    check_batch(trainer, batch, trainer.train_dataset)
    source, columns = trainer.trace_source(batch)
    per_sample, sequence = tokens_of(batch, _main_input(trainer))
    return Workload(
        source,
        samples_of(batch, columns, _main_input(trainer)).of,
        samples,
        tokens_per_sample=per_sample,
        sequence=sequence,
        optimizer=partial(similar_optimizer, trainer),
        common=common_options(args),
        features=parse_features(args.feature_dict) if args.feature_dict else None,
        steps_beside_backward=steps_beside_backward(args),
        dp=(mesh.given and mesh.given.dp) or mesh.dp,
    )


def _first_samples(trainer: Any) -> dict[str, Any]:
    """A batch of as many samples as the largest microbatch that is searched, with the longest."""
    loader = _loader(trainer, MOST_MICROBATCH)
    found = longest_batch(loader, _main_input(trainer), seed=trainer.args.seed)
    if found.length is not None:
        announce(
            "plan: for batches as long as the longest of the %d samples that were looked at (%d); "
            "longer ones take more memory",
            found.num_looked_at,
            found.length,
        )
    return found.columns


def _loader(trainer: Any, num_samples: int) -> DataLoader[Any]:
    """A loader of a single process, with so many samples in a batch."""
    usual = trainer._train_batch_size
    trainer._train_batch_size = num_samples
    try:
        with torch.random.fork_rng(devices=[]):
            loader: DataLoader[Any] = Trainer.get_train_dataloader(trainer)
    finally:
        trainer._train_batch_size = usual
    return loader


def _main_input(trainer: Any) -> str:
    return str(getattr(trainer.model, "main_input_name", "input_ids"))


@dataclass(slots=True)
class _Refusal:
    """Layouts that the arguments or the data do not allow.

    Args:
        args: of the job.
        dataset: that is trained on.
        mesh: of the job, in whatever layout.
    """

    args: MerakArguments
    dataset: Any
    mesh: Mesh
    _known: dict[Any, str | None] = field(init=False, default_factory=dict)

    def reason(self, candidate: Candidate) -> str | None:
        """Why a layout is not allowed; None where it is.

        Args:
            candidate: the layout.
        """
        own = candidate
        key = (own.dp, own.form, own.pp, own.zero, own.schedule)
        if key not in self._known:
            self._known[key] = self._reason(own)
        return self._known[key]

    def _reason(self, candidate: Candidate) -> str | None:
        args = copy.copy(self.args)
        set_layout(args, candidate)
        mesh = candidate.mesh(self.mesh.rank, self.mesh.device)
        problem = argument_problem(args, mesh)
        if problem is None and isinstance(self.dataset, Sized):
            batches = range(-(-len(self.dataset) // candidate.microbatch))
            try:
                refuse_unequal_replicas(args, batches, candidate.dp)
            except DataError as error:
                problem = str(error)
        return None if problem is None else problem.rstrip(".")


def check_plan_file(trainer: Any, batch: Mapping[str, Any]) -> None:
    """Refuse a plan file for another model, and warn of one for another sequence or optimizer.

    Args:
        trainer: a `MerakTrainer` whose arguments may name a plan.
        batch: of the first samples.

    Raises:
        PlanError: the plan is for another model; the first difference is named.
    """
    path = trainer.args.plan
    if path is None or path == AUTO_PLAN:
        return
    plan = read_plan(Path(path))
    refuse_other_model(plan, trainer.model, str(path))
    _, sequence = tokens_of(batch, _main_input(trainer))
    name = optimizer_name(partial(similar_optimizer, trainer))
    for sentence in job_differences(plan, sequence, name):
        warn_on_rank0(logger, "%s: %s", path, sentence)

"""The lower level: a parallel model on a mesh of ranks, for a training loop of one's own."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from merak.arguments import default_trace_cache
from merak.checkpoint.manifest import MODEL
from merak.checkpoint.pretrained.whole_tensors import WholeTensors
from merak.checkpoint.remote.fetching import opened
from merak.checkpoint.remote.folder import is_url
from merak.checkpoint.saved import check_valid
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import load_state
from merak.core.announce import announce
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import (
    ArgumentsError,
    ScheduleError,
    TrainingError,
    WeightsError,
    caused_by,
    did_you_mean,
    keyword_names,
    refuse_unknown,
)
from merak.core.mesh import Mesh, current_mesh
from merak.core.precision import check_autocast
from merak.core.rank0 import warn_on_rank0, warn_once
from merak.core.tensor_meta import Signature
from merak.data import drop_non_tensors, signature, signatures, split_non_tensors
from merak.data.microbatches import Batch, listed, refuse_shared_images, split_batch
from merak.engine import Engine
from merak.engine.build import build_with_forecast, lay_out_evaluation
from merak.engine.health.figures import memory_bytes
from merak.engine.layer_dropping import drop_layers
from merak.engine.optimizer.second_step import refuse_second_steps
from merak.engine.parameters.gathered import stream_weights
from merak.engine.planning.own_loop import plan_loop, take_layout
from merak.engine.planning.reductions import choose_reductions
from merak.engine.planning.replan import PlanWatch, with_partition
from merak.engine.planning.shapes import samples_of
from merak.engine.rank_arguments import (
    example_of_rank0,
    refuse_differences,
    refuse_different_optimizers,
    stand_in_optimizer,
)
from merak.engine.rank_state import rank_state
from merak.engine.recording.description import describe_job
from merak.engine.recording.loop import LoopFigures
from merak.engine.recording.recorder import RunRecorder
from merak.engine.step.last_step import LastStep, OpenStep
from merak.engine.step.loss_scale import MAX_SKIPPED_STEPS, LossScale
from merak.engine.step.optimizer_step import FiniteCheck, StepNumbers
from merak.graph.segment.build import GraphSource
from merak.graph.segment.unread_arguments import unread_arguments
from merak.graph.trace.calls.call import LossFunction
from merak.graph.weights.gather_weights import make_whole
from merak.plan.activations.forecast import Forecast
from merak.plan.engine_options import EngineOptions
from merak.plan.optimizer.home import steps_beside_backward
from merak.schedule.registry import traits

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Policy for steps whose loss or gradient is not finite.

    Args:
        stops: whether one ends the job; else it is left out.
        locate: whether to find the operator where it appeared.
    """

    stops: bool
    locate: bool


_STEPPED = "step(batch) runs forward, backward, clipping and optimizer"
_GATHERED = "gather_state_dict() gives the whole model's on rank 0"
_OF_MODEL = "it is an attribute of the model that was laid out: `.model`"
_ON_DEVICE = "merak.init(device=…) chooses where it computes, autocast=… or the model's dtype how"

_HABITS: Mapping[str, str] = MappingProxyType(
    {
        "__call__": f"{_STEPPED}, evaluate(batch) gives the loss alone",
        "forward": f"{_STEPPED}, evaluate(batch) gives the loss alone",
        "backward": _STEPPED,
        "zero_grad": f"{_STEPPED}, and clears gradients before",
        "clip_grad_norm_": "the argument max_grad_norm=… clips",
        "no_sync": "num_microbatches=… accumulates gradients, reduced once a step",
        "train": "step(batch) trains, whatever the mode; leave it out",
        "eval": "evaluate(batch) computes without dropout and gradients; leave it out",
        "requires_grad_": "freeze parameters of the model before merak.parallelize",
        "parameters": "optimizer=lambda parameters: … gets this rank's; `.model` names them",
        "named_parameters": f"`.model` has this rank's, and {_GATHERED}",
        "state_dict": f"{_GATHERED}, save_checkpoint(folder) saves it with the optimizer",
        "load_state_dict": "load_checkpoint(folder) loads what save_checkpoint(folder) has saved; "
        "weights of another file are loaded into the model before merak.parallelize",
        "save_pretrained": "save_checkpoint(folder), then `.model.save_pretrained(…)`",
        "generate": "`with merak.callable_model(model) as whole` gives one that does, on all ranks",
        "module": _OF_MODEL,
        "config": f"{_OF_MODEL}.config",
        "device": "`.engine.mesh.device` is this rank's",
        **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float"), _ON_DEVICE),
    }
)
"""What habits of loops in PyTorch are here, by the attribute that a `ParallelModel` lacks."""


class ParallelModel:
    """A model laid out over the ranks, as `parallelize` makes it.

    Args:
        model: the user's model, which now holds this rank's parameters alone.
        engine: this rank's engine.
        num_microbatches: how many parts each batch is cut into.
        optimizer: makes this rank's optimizer from its parameters; None steps nothing.
        max_grad_norm: clip the global gradient norm to this; None leaves it.
        scaler: the loss scale of fp16; None for other precisions.
        not_finite: what becomes of steps whose loss or gradient is not finite; None looks at none.
        plain: arguments in every batch that are no tensors, with the type of unread ones.
        loop: the figures of its steps; None for those of a loop that is not recorded.
        plan_watch: compares a plan that was searched with the first steps; None for none.
        again: makes such a model anew, in the layout that `plan_watch` has found.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        num_microbatches: int,
        optimizer: OptimizerFactory | None,
        max_grad_norm: float | None,
        scaler: LossScale | None = None,
        not_finite: NotFinite | None = None,
        plain: Mapping[str, Any] = MappingProxyType({}),
        loop: LoopFigures | None = None,
        plan_watch: PlanWatch | None = None,
        again: Callable[[], ParallelModel] | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.num_microbatches = num_microbatches
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler
        self.plain = plain
        self._finite_check = FiniteCheck(scaler)
        self._last_step = LastStep(self._skips)
        self._not_finite = not_finite
        own = list(engine.optimizer_params.named.values())
        with engine.watch.paused():
            self.optimizer = optimizer(own) if optimizer is not None and own else None
        self._is_stepping = False
        refuse_second_steps(engine.optimizers, self.optimizer, lambda: self._is_stepping)
        engine.connect_optimizer(self.optimizer)
        refuse_different_optimizers(self.optimizer, with_groups=False)
        self._update = self._step_optimizer if optimizer is not None else None
        engine.steps_early = self._update is not None and steps_beside_backward(
            clips=max_grad_norm is not None and not engine.optimizer_params.delayed,
            scales=scaler is not None,
            skips=not_finite is not None and not not_finite.stops,
            locates=not_finite is not None and not_finite.locate,
        )
        self.num_steps = 0
        self._loop = loop or LoopFigures(engine, None, None)
        self._plan_watch = plan_watch
        self._again = again

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch: forward, backward, reduction, clipping, optimizer.

        An asynchronous schedule steps the optimizer several times on its way, each time for the
        mean of some of the microbatches.

        Args:
            batch: this replica's columns, (num_microbatches × microbatch, …) each; the same on
                every pipeline and tensor parallel rank of the replica. A list of microbatches where
                the rows of a column are not samples, such as the patches or images of them all.

        Returns:
            The loss, a scalar: the mean over microbatches and replicas, the same on every rank.

        Raises:
            DataError: a batch that does not divide into the microbatches, or has other plain
                arguments than the one that the model was traced with.
            TrainingError: the loss or a gradient is NaN or infinite, as `nan_policy` says, or fp16
                overflows again and again, whatever the loss scale.
        """
        microbatches = self._microbatches(batch)
        scale = 1.0 / (self.num_microbatches * self.engine.mesh.dp)
        self._loop.begin_step()
        self.engine.optimizer_params.clear_gradients()
        found = signatures(microbatches, self.engine.queried_masks)
        columns = [one.columns for one in found]
        loss_scale = 1.0 if self.scaler is None else self.scaler.current()
        losses = self.engine.train_step(
            self.num_steps, columns, microbatches, scale, self._update, loss_scale
        )
        loss = losses.sum()
        self.engine.all_reduce(loss, "dp", "losses")

        ran = self.num_steps, columns, microbatches, scale, loss_scale
        locate = partial(self.engine.locate_non_finite, *ran)
        is_left_out = self._is_left_out(loss, locate)
        if not is_left_out and not self.engine.updates_inside:
            self._step_optimizer()
        self.num_steps += 1
        self._loop.end_step(self.num_microbatches * self.engine.mesh.dp)
        if self._plan_watch is not None:
            self._plan_watch.compare(self.engine, self.num_steps)
        return loss

    def _microbatches(self, batch: Batch) -> Sequence[dict[str, torch.Tensor]]:
        """Cut a batch into microbatches, unless it is a list of them."""
        own = [drop_non_tensors(one, self.plain) for one in listed(batch)]
        if self.num_microbatches > 1 and not isinstance(batch, list):
            refuse_shared_images(own[0], getattr(self.model, "config", None))
        return split_batch(own if isinstance(batch, list) else own[0], self.num_microbatches)

    def connect_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let checkpoints hold the optimizer that the loop steps; all ranks call it together.

        For a loop that clips or steps apart from `step`, to which `parallelize` gave no optimizer.

        Args:
            optimizer: over parameters of the model; it steps this rank's tensors.

        Raises:
            ArgumentsError: `parallelize` was given one, or ranks cannot step this one.
        """
        if self._update is not None:
            raise ArgumentsError(
                "merak.parallelize was given an optimizer, which step(batch) steps; leave it out "
                "there, or leave connect_optimizer out."
            )
        self.engine.connect_optimizer(optimizer)
        self.optimizer = optimizer

    def figures(self, **logged: float) -> dict[str, float]:
        """Figures of the steps since the last call, for a logger; all ranks call it together.

        With `run_record`, they become a log of the run's record, too.

        Args:
            **logged: figures of the loop, such as `loss=float(loss)` and `learning_rate=…`.

        Returns:
            The same on every rank, with those of the loop: `step_seconds`, `bubble`, memory in GB
            of the fullest rank and of each pp rank, and `mfu` where `run_record` is given and the
            device's peak is known.
        """
        self._last_step.read()
        return self._loop.take(self.num_steps, logged)

    def _is_left_out(self, loss: torch.Tensor, locate: Callable[[], str]) -> bool:
        """Clip the gradients, and tell whether the host leaves the step out; equal on all ranks."""
        engine, norm = self.engine, None
        if self.max_grad_norm is not None:
            norm = engine.clip_gradients(self.max_grad_norm)
        if self.scaler is None and self._not_finite is None:
            return False
        norm = engine.gradient_norm() if norm is None else norm
        end = self._finite_check.end(norm, loss)
        self._last_step.read()  # the step before, while the device runs this one
        is_masked = self._update is not None and engine.reads_late
        return self._last_step.take(engine, OpenStep(self.num_steps, end, locate, is_masked))

    def _skips(self, step: OpenStep, numbers: StepNumbers) -> bool:
        """Whether a step is left out, as it is not finite; equal on all ranks.

        Raises:
            TrainingError: the policy says so; what ran after the step is not stepped.
        """
        check, policy = self._finite_check, self._not_finite
        if not check.fails(numbers):
            return False
        found = f"loss {numbers.loss} and gradient norm {numbers.norm}"
        if not check.is_overflow:
            if policy is not None and policy.locate:
                found += f" ({step.locate()})"
            self._refuse(step.number, found)
        warn_on_rank0(logger, "step %d skipped: %s", step.number, found)
        return True

    def _refuse(self, step: int, found: str) -> None:
        """Refuse to skip a step that is not finite, as far as the policy says so."""
        num_failed, policy = self._finite_check.num_failed, self._not_finite
        if policy is not None and policy.stops:
            raise TrainingError(
                f"step {step} has {found}; lower the learning rate or look at its data, "
                "or leave such steps out with nan_policy='skip'."
            )
        if num_failed > MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"step {step} has {found}, and the {MAX_SKIPPED_STEPS} steps before it "
                "were skipped too, so the model has diverged; go on from earlier weights with a "
                "lower learning rate, or look at the data."
            )

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute that there is not.

        Raises:
            ArgumentsError: always, an AttributeError too; it says what does its work here.
        """
        if "engine" not in vars(self):
            sentence = "`replanned` has laid this model out anew; go on with what it gave."
            raise caused_by(AttributeError(), sentence)
        known = _HABITS.get(name)
        fix = f"; {known}." if known else did_you_mean(name, vars(ParallelModel))
        raise caused_by(AttributeError(), f"what merak.parallelize makes has no {name}{fix}")

    def __call__(self, *_: object, **__: object) -> Any:
        """Refuse to be called as the model is.

        Raises:
            ArgumentsError: always, a TypeError too.
        """
        raise caused_by(
            TypeError(), f"what merak.parallelize makes is not called; {_HABITS['__call__']}."
        )

    def check_replicas(self) -> None:
        """Refuse to go on where copies of a parameter differ; all ranks call it together.

        Replicas, tied parameters, and those that tensor parallel ranks do not split are equal bit
        by bit, unless a device or the memory of a host is faulty.

        Raises:
            TrainingError: they differ.
        """
        self._last_step.read()
        self.engine.check_replicas(f"after step {self.num_steps}")

    def save_checkpoint(
        self, folder: str | os.PathLike[str], values: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters, optimizer, loss scale and step; all ranks call it together.

        Until the next step, `state_dict()` and `save_pretrained()` of the model read the whole
        weights from there, on any rank alone.

        Args:
            folder: of this checkpoint alone, seen by all ranks; it appears, or is replaced, when
                all of it is on disk. Or its URL on storage that fsspec knows, such as
                s3://bucket/run/100, which hosts without a shared file system can use, too.
            values: further small values of the loop, such as its learning rate schedule's
                `state_dict()`: numbers, text, and lists and dicts of these. Rank 0's are saved.

        Raises:
            SavingError: it cannot be written. A checkpoint that was there is as it was.
        """
        self._last_step.read()
        scaler = {} if self.scaler is None else {"loss_scale": self.scaler.state_dict()}
        own = {"num_steps": self.num_steps, "of_the_loop": dict(values or {}), **scaler}
        with self.engine.whole_model():
            state = rank_state(self.engine, self.model, self.optimizer)
            save_state(folder, state, Contents(values=own))
        self._read_from(folder)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Load a checkpoint of `save_checkpoint`, in any layout; all ranks call it together.

        Args:
            folder: of the checkpoint, or its URL.

        Returns:
            The values that were given to `save_checkpoint`.

        Raises:
            WeightsError: it is damaged, or of another model.
        """
        with opened(folder) as here, self.engine.whole_model():
            check_valid(here)
            self._last_step.forget()
            found = load_state(here, rank_state(self.engine, self.model, self.optimizer))
        self._read_from(folder)
        if "num_steps" not in found:
            raise WeightsError(
                f"{os.fspath(folder)} was not saved by save_checkpoint; resume it with the trainer "
                "that wrote it, or start anew from its weights (merak export)."
            )
        self.num_steps = found["num_steps"]
        if self.scaler is not None and "loss_scale" in found:
            self.scaler.load_state_dict(found["loss_scale"])
        own: Mapping[str, Any] = found["of_the_loop"]
        return own

    def replanned(self, folder: str | os.PathLike[str]) -> ParallelModel:
        """What goes on behind a checkpoint, with `replan=True`; all ranks call it together.

        Where the first steps have shown another layout to be over 5 % faster, the ranks are laid
        out in it, and load the checkpoint. `merak.core.mesh.current_mesh()` gives their degrees,
        by which the loop takes its rows from then on; learning rate schedules are made anew, of the
        new `optimizer`.

        Args:
            folder: of the checkpoint that `save_checkpoint` has saved last.

        Returns:
            This model itself, or the one in the other layout. This one then does nothing more.

        Raises:
            WeightsError: as of `load_checkpoint`.
        """
        watch = self._plan_watch
        if watch is None or watch.layout is None or self._again is None:
            return self
        announce("plan: goes on from %s in %s", os.fspath(folder), with_partition(watch.layout))
        again = self._again
        self._forget_layout()
        made = again()
        made.load_checkpoint(folder)
        watch.start(made.num_steps)
        return made

    def _forget_layout(self) -> None:
        """Make the model whole again, and hold nothing of the layout: memory may not be for two."""
        make_whole(self.model)
        device = self.engine.mesh.device
        if (own := self.optimizer) is not None:  # which a schedule of the loop's may hold
            groups = [{**group, "params": []} for group in own.param_groups]
            kept = {"defaults": own.defaults, "state": {}, "param_groups": groups}
            vars(own).clear()
            own.__setstate__(kept)
        for name in set(vars(self)) - {"model"}:
            del vars(self)[name]
        gc.collect()  # of the engine, whose objects are in cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _read_from(self, place: str | os.PathLike[str]) -> None:
        """Let methods of the model that need all of its weights read a checkpoint, if on disk."""
        if is_url(place):
            self.engine.last_weights.forget(f"they are at {os.fspath(place)}, and not on disk")
            return
        folder = Path(place).absolute()
        self.engine.last_weights.keep(folder, WholeTensors(folder, MODEL))

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict on rank 0, on the CPU; all ranks call it together.

        Returns:
            Parameters and persistent buffers by name; nothing on other ranks.
        """
        return self.engine.gather_state_dict()

    def stream_weights(self, rank: int | None = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Iterate over the model's whole weights; all ranks do so together.

        Args:
            rank: which gets the tensors; None for every rank.

        Returns:
            As of `merak.stream_weights`.

        Raises:
            ArgumentsError: as of `merak.stream_weights`.
        """
        return stream_weights(self.model, rank)

    def _step_optimizer(self) -> None:
        if self._update is None:  # the loop steps its own
            return
        if self.optimizer is None:  # a rank without parameters gathers those of others
            self.engine.optimizers.step_none()
            return
        self._is_stepping = True
        self.optimizer.step()
        self._is_stepping = False

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss of one batch, without training.

        Args:
            batch: as in `step`.

        Returns:
            The loss, a scalar: the mean over microbatches and replicas, the same on every rank.
        """
        engine = self.engine
        microbatches = self._microbatches(batch)
        made = engine.evaluate([signature(b).columns for b in microbatches], microbatches)
        losses = [outputs["loss"] for outputs in made if "loss" in outputs]
        total = (
            torch.stack(losses).float().sum()
            if losses
            else torch.zeros((), device=engine.mesh.device)
        )
        total = total / (self.num_microbatches * engine.mesh.dp)
        for axis in ("pp", "dp"):
            engine.all_reduce(total, axis, "losses")
        return total


def parallelize(
    model: nn.Module,
    example_batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    num_microbatches: int = 1,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    nan_policy: str = "stop",
    locate_nan: bool = False,
    plan: str | None = None,
    replan: bool = False,
    cluster: str | None = None,
    run_record: str | os.PathLike[str] | None = None,
    evaluates: bool = False,
    **options: Any,
) -> ParallelModel:
    """Lay a model out over the ranks of `merak.init`, to train it in a loop of one's own.

    Args:
        model: any traceable module, called as `model(**batch)`; returns a loss without `loss_fn`.
        example_batch: one replica's batch, or list of microbatches, as `step` will get it.
            Booleans, numbers, texts and None in it are arguments of the model that every batch has.
        loss_fn: `loss_fn(outputs, batch) -> loss`; columns that forward does not name are its own.
        optimizer: one, or a factory such as `lambda own: torch.optim.AdamW(own, lr=1e-3)`.
        num_microbatches: parts that every batch is cut into; the pipeline's microbatches.
        max_grad_norm: clip the global gradient norm to this.
        autocast: mixed precision: the model runs under torch.autocast with this type, over
            parameters of float32; float16 comes with a loss scale.
        nan_policy: of a step whose loss or gradient is NaN or infinite: "stop" raises an error on
            all ranks, "skip" leaves the parameters alone, "ignore" steps the optimizer.
        locate_nan: run such a step once more, and name the source line where it appeared.
        plan: "auto" searches the layout: num_microbatches, and options that are left out. A step
            has `example_batch` of every replica; of every rank where `merak.init` got no dp.
        replan: with plan="auto", whether `replanned` goes on in another layout where the first
            steps show that it would be more than 5 % faster. Without, they say so.
        cluster: the devices, for what is "auto", as of `MerakArguments`.
        run_record: folder in which calls of `figures` keep the record that `merak report` shows.
        evaluates: lay out `evaluate` now, which else the first call does: it may be refused.
        **options: fields of `merak.plan.options.ParallelOptions`, as of `MerakArguments`; `seed`.

    Returns:
        The parallel model, with `step` and `evaluate`.

    Raises:
        MeshError: `merak.init` has not been called.
        MerakError: an unknown option, or model, batch and degrees do not fit together.
    """
    factory = _factory(optimizer)
    given = _agreed_options(**locals())
    not_finite = _not_finite(nan_policy, locate_nan)
    _refuse_replan(replan, plan, is_made=factory is not optimizer)
    example, named = _example(example_batch, num_microbatches), frozenset(given)
    chosen = EngineOptions(**given, num_microbatches=num_microbatches, optimizer=factory)
    loop = max_grad_norm, autocast, not_finite, plan, replan, cluster, named, run_record, evaluates
    is_cut = isinstance(example_batch, list)
    return _Call(model, loss_fn, example, chosen, *loop, is_cut).lay_out()


def _example(batch: Batch, num_microbatches: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns and plain arguments of an example batch, or of the first of its microbatches.

    Raises:
        ArgumentsError: there is another number of them.
    """
    if isinstance(batch, list) and len(batch) != num_microbatches:
        raise ArgumentsError(
            f"example_batch is a list of {len(batch)} microbatches, and num_microbatches="
            f"{num_microbatches}; give as many. Where plan='auto' chooses it, give one batch."
        )
    return split_non_tensors(listed(batch)[0])


@dataclass(frozen=True, slots=True)
class _Call:
    """What `parallelize` was called with, the same on all ranks."""

    model: nn.Module
    loss_fn: LossFunction | None
    example: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
    options: EngineOptions
    max_grad_norm: float | None
    autocast: torch.dtype | None
    not_finite: NotFinite | None
    plan: str | None
    replan: bool
    cluster: str | None
    named: frozenset[str]
    run_record: str | os.PathLike[str] | None
    evaluates: bool
    is_cut: bool

    @property
    def example_parts(self) -> int:
        """Into how many microbatches the example is to be cut."""
        return 1 if self.is_cut else self.options.num_microbatches

    def lay_out(self, watch: PlanWatch | None = None) -> ParallelModel:
        """Lay the model out; all ranks call it together.

        Args:
            watch: has found the layout; None for that of the options, or of a plan.
        """
        options, (columns, fixed) = self.options, self.example
        source = _source(self.model, self.loss_fn, fixed, self.autocast)
        plain = _agreed_arguments(source, columns, self.example_parts)
        is_half = self.autocast == torch.float16
        scaler = LossScale(current_mesh().device) if is_half else None
        needs = self.max_grad_norm, scaler, self.not_finite
        inside = _updates_inside(options, self.plan)
        _refuse_what_needs_all_gradients(inside, options.schedule, *needs)
        built = _build(source, columns, self, watch)
        _refuse_what_needs_all_gradients(built.engine.updates_inside, options.schedule, *needs)
        figures, watch = _loop_figures(built, self.autocast, self.run_record), built.plan_watch
        again = None if watch is None else partial(self.lay_out, watch)
        rest = options.optimizer, *needs, plain, figures, watch, again
        return ParallelModel(self.model, built.engine, built.num_microbatches, *rest)


def _refuse_replan(replan: bool, plan: str | None, *, is_made: bool) -> None:
    """Refuse to go on in other layouts where none is searched, or the optimizer has one.

    Raises:
        ArgumentsError: it cannot be.
    """
    if not replan:
        return
    if plan != AUTO_PLAN and current_mesh().given is None:
        raise ArgumentsError(
            "replan=True is for a plan that is searched; set plan='auto', or leave it out."
        )
    if is_made:
        raise ArgumentsError(
            "replan=True makes the optimizer of another layout's tensors, and this one is made; "
            "give a factory: optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3)."
        )


def _factory(
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
) -> OptimizerFactory | None:
    """Return a factory of this rank's optimizer, also of one that a script has made."""
    return (lambda _: optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _agreed_arguments(
    source: GraphSource, columns: Mapping[str, torch.Tensor], num_microbatches: int
) -> dict[str, Any]:
    """Arguments of every batch, with the type of those that nothing reads; a collective.

    Raises:
        ArgumentsError: one that the model reads differs by rank.
    """
    sample = signature(split_batch(columns, num_microbatches)[0]).columns
    unread = unread_arguments(source, dict(sample))
    plain = {n: type(v) if n in unread else v for n, v in source.fixed.items()}
    refuse_differences({f"example_batch[{name!r}]": value for name, value in plain.items()})
    return plain


def _agreed_options(
    *,
    model: object,
    example_batch: object,
    optimizer: object,
    factory: OptimizerFactory | None,
    run_record: object,
    options: Mapping[str, Any],
    **arguments: object,
) -> dict[str, Any]:
    """Options of `parallelize` by their present names, the same on all ranks; a collective.

    Raises:
        ArgumentsError: an argument of `parallelize` differs by rank, or is none.
    """
    given = _todays_options(options)
    own = {"optimizer": factory, "run_record": run_record is not None}
    refuse_differences({**arguments, **given, **own})
    refuse_different_optimizers(stand_in_optimizer(factory))
    return given


def _source(
    model: object,
    loss_fn: LossFunction | None,
    plain: Mapping[str, Any],
    autocast: torch.dtype | None,
) -> GraphSource:
    """The model as it is to be traced, with all of its weights.

    Raises:
        ArgumentsError: it is no module.
    """
    device = current_mesh().device
    if not isinstance(model, nn.Module):
        own = ", whose attribute `model` is one" if isinstance(model, ParallelModel) else ""
        raise ArgumentsError(
            f"the model is a {type(model).__name__}{own}; give merak.parallelize a torch.nn.Module."
        )
    check_autocast(autocast, device)
    make_whole(model)
    return GraphSource(model, loss_fn, fixed=plain, device=device, autocast=autocast)


def _searches_plan(plan: str | None, mesh: Mesh, num_microbatches: int) -> bool:
    """Whether a plan is to be searched: `merak.init(plan="auto")` says so, too.

    Raises:
        ArgumentsError: the plan is a file, or something that it chooses is given.
    """
    if plan not in (None, AUTO_PLAN):
        raise ArgumentsError(
            f"plan={plan!r} is not a choice; use 'auto', or the options of the plan file one by "
            "one."
        )
    searches = plan == AUTO_PLAN or mesh.given is not None
    if searches and num_microbatches != 1:
        raise ArgumentsError(
            f"num_microbatches={num_microbatches} is for plan='auto' to choose; leave it out."
        )
    return searches


def _build(
    source: GraphSource,
    columns: Mapping[str, torch.Tensor],
    call: _Call,
    watch: PlanWatch | None,
) -> _Built:
    """The engine, with the plan that is searched if one is to be, and its microbatches."""
    options, cluster = call.options, call.cluster
    mesh, columns = current_mesh(), example_of_rank0("example_batch", columns)
    drop_layers(source, options)
    cache = Path(default_trace_cache()) if default_trace_cache() else None
    if _searches_plan(call.plan, mesh, options.num_microbatches) or watch is not None:
        source.example = columns
        batch = samples_of(columns, signature(columns).columns)
        if watch is not None and watch.layout is not None:
            options, sample = take_layout(watch.layout, watch, options, batch)
        else:
            given = options, cluster, cache, call.named, call.replan
            watch, options, sample = plan_loop(mesh, source, batch, *given)
        mesh = current_mesh()
    else:
        example = split_batch(columns, call.example_parts)[0]
        source.example, sample = example, signature(example).columns
    options = choose_reductions(mesh, source.model, options, cluster, cache)
    _, process_bytes = memory_bytes(mesh.device)
    engine, forecast = build_with_forecast(source, sample, mesh, options)
    if call.evaluates:
        lay_out_evaluation(engine, sample, "leave evaluates=True out")
    if idle := engine.idle_pipeline("num_microbatches"):
        warn_on_rank0(logger, "%s", idle)
    return _Built(engine, options.num_microbatches, forecast, sample, process_bytes, watch)


@dataclass(frozen=True, slots=True)
class _Built:
    """Engine of a rank, and what it was built from.

    Args:
        engine: of this rank.
        num_microbatches: parts of every batch.
        forecast: of the job.
        sample: columns of a microbatch.
        process_bytes: of this process before it had its weights; None where it is not known.
        plan_watch: compares a plan that was searched with the first steps; None for none.
    """

    engine: Engine
    num_microbatches: int
    forecast: Forecast
    sample: Signature
    process_bytes: int | None
    plan_watch: PlanWatch | None


def _loop_figures(
    built: _Built, autocast: torch.dtype | None, run_record: str | os.PathLike[str] | None
) -> LoopFigures | None:
    """Figures of a loop whose run is recorded; None where it is not."""
    if run_record is None:
        return None
    cache = Path(default_trace_cache()) if default_trace_cache() else None
    found = describe_job(built.forecast, built.sample, cache, autocast, built.process_bytes)
    recorder = RunRecorder(built.engine.mesh, os.fspath(run_record), found.job)
    return LoopFigures(built.engine, recorder, found.utilisation)


def _not_finite(nan_policy: str, locate_nan: bool) -> NotFinite | None:
    """The policy that a user names.

    Raises:
        ArgumentsError: there is none of that name.
    """
    if nan_policy not in ("stop", "skip", "ignore"):
        raise ArgumentsError(
            f"nan_policy={nan_policy!r} is not a choice; use 'stop', 'skip' or 'ignore'."
        )
    if nan_policy == "ignore":
        if locate_nan:
            raise ArgumentsError(
                "locate_nan=True looks at steps that are not finite, but nan_policy='ignore' looks "
                "for none; use 'stop' or 'skip'."
            )
        return None
    return NotFinite(nan_policy == "stop", locate_nan)


def _updates_inside(options: EngineOptions, plan: str | None) -> bool:
    """Whether a schedule is known to be asynchronous, before a plan is searched."""
    if plan is not None:
        return False
    name, chosen = options.schedule, options.schedule_options or {}
    return not traits(name, current_mesh().pp, options.num_microbatches, chosen).is_synchronous


def _refuse_what_needs_all_gradients(
    updates_inside: bool,
    schedule: str,
    max_grad_norm: float | None,
    scaler: LossScale | None,
    not_finite: NotFinite | None,
) -> None:
    """Refuse what needs all gradients of a step where a schedule updates stages inside of it.

    Raises:
        ScheduleError: an option that does.
    """
    if not updates_inside:
        return
    if max_grad_norm is not None:
        raise ScheduleError(
            f"schedule={schedule!r} updates stages at different times, so there is no norm "
            f"of all gradients to clip; leave max_grad_norm={max_grad_norm} out."
        )
    if scaler is not None:
        raise ScheduleError(
            f"schedule={schedule!r} updates stages before a step's last gradient is known, "
            "so no rank can tell whether float16 has overflowed; use autocast=torch.bfloat16."
        )
    if not_finite is not None and (not_finite.locate or not not_finite.stops):
        option = "locate_nan=True" if not_finite.locate else "nan_policy='skip'"
        raise ScheduleError(
            f"schedule={schedule!r} updates weights inside a step, which {option} cannot undo; use "
            "nan_policy='stop' without locate_nan, or a synchronous schedule such as '1f1b'."
        )


_RENAMED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "features": ("feature_dict", lambda value: value),
    "segments_per_stage": ("partition", lambda value: value),
    "memory_budget_bytes": ("memory_budget", lambda value: value),
    "exact_tied_gradients": ("tied_gradients", lambda exact: "microbatch" if exact else "step"),
    "float32_gradients": ("gradient_sums", lambda float32: "float32" if float32 else "own"),
}
"""Former names of options: the name of today, and its value for a former one's."""


def _todays_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their present names; a former name is warned of.

    Args:
        options: by name, as given to `merak.parallelize`.

    Raises:
        ArgumentsError: an option is given by its former and its present name, or there is none.
    """
    found: dict[str, Any] = dict(options)
    for former, (name, convert) in _RENAMED.items():
        if former not in found:
            continue
        if name in found:
            raise ArgumentsError(f"{former} is today called {name}; leave {former} out.")
        found[name] = convert(found.pop(former))
        warn_once(logger, "The option %s is today called %s.", former, name)
    known = [*keyword_names(parallelize), *(one.name for one in fields(EngineOptions))]
    refuse_unknown("merak.parallelize", found, known)
    return found

"""Saving and resuming: transformers' checkpoints, with weights that many ranks hold.

A checkpoint is one folder, written aside in the background and renamed when it is whole: the model
as `from_pretrained` reads it, the trainer's state, and the ranks' shards, which any layout reads.
Random draws and the order of the data are keyed by step and sample, so there is no random state to
keep.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
)

from merak.arguments import refuse_different_arguments
from merak.checkpoint.description import describe_model
from merak.checkpoint.files import remove_partial
from merak.checkpoint.formats.of_trainer import Order
from merak.checkpoint.manifest import MANIFEST, MODEL
from merak.checkpoint.model_files import ModelFiles, plan_model_files
from merak.checkpoint.pretrained.export import is_of_model
from merak.checkpoint.pretrained.whole_tensors import WholeTensors
from merak.checkpoint.remote.fetching import (
    fetch,
    forget_tensors,
    is_fetched,
    opened,
    remove_fetched,
)
from merak.checkpoint.remote.folder import RemoteFolder, name_of
from merak.checkpoint.save_pretrained import on_rank0, save_pretrained, save_whole
from merak.checkpoint.saved import open_checkpoint
from merak.checkpoint.saver import CheckpointSaver, Contents, save_weights
from merak.checkpoint.state import check_model, load_state
from merak.checkpoint.writing import writing_into
from merak.core.announce import announce
from merak.core.errors import ArgumentsError, RefusedBatchError, SavingError, WeightsError
from merak.core.files.folder_owner import owning, this_job
from merak.core.health.roll_call import call_the_roll, tell_others, wait_for_rank0
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0, failing_together, warn_on_rank0
from merak.engine import Engine
from merak.engine.rank_state import rank_state
from merak.engine.step.loss_scale import LossScale
from merak.graph.weights.holders import find_holders
from merak.graph.weights.laid_out import ReadTensors, is_in_parts
from merak.trainer.before import check_output, leaves_last_weights, saves_checkpoints
from merak.trainer.logs import Logging
from merak.trainer.resuming import (
    AUTO,
    checkpoint_place,
    checkpoint_to_resume,
    is_there,
    outdated,
    remove_checkpoint,
)
from merak.trainer.subclass.methods import overriding
from merak.trainer.unsupported import refuse_no_steps

logger = logging.getLogger(__name__)

_PUSH = "push to the hub"

LAST_WEIGHTS = "last-weights"
"""Folder of the last weights in a job's output folder."""

ARGUMENTS_FILE = "training_args.json"
"""Arguments of a job beside its model, for people."""

if TYPE_CHECKING:
    pass


class _Left(NamedTuple):
    """The last weights, as rank 0 finds them on disk.

    Args:
        folder: that has them.
        manifest: hash of its manifest.
        host: of rank 0.
    """

    folder: Path
    manifest: str
    host: str


class Pushing(Logging):
    """The part of `MerakTrainer` that talks to the hub."""

    hub_model_id: Any

    @property
    def _were_left(self) -> bool:
        """Whether the model's weights are on disk, for each rank to read alone."""
        return self.engine is not None and self.engine.last_weights.were_left

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository on the hub, which all ranks then know.

        Args:
            *args: as of transformers.
            **kwargs: as of transformers.
        """

        def make() -> str | None:
            super(Pushing, self).init_hf_repo(*args, **kwargs)
            name: str | None = self.hub_model_id
            return name

        self.hub_model_id = decide_on_rank0(self.mesh, "making the hub's repository", make)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model, which all ranks do together, and push it from rank 0.

        Args:
            *args: as of transformers.
            **kwargs: as of transformers.

        Returns:
            As of transformers; None on other ranks.
        """
        with nullcontext() if self._were_left else failing_together(self.mesh, _PUSH):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        url: str | None = self.args.checkpoint_url
        with failing_together(self.mesh, _PUSH):
            if url is None or self.mesh.rank != 0:
                super()._push_from_checkpoint(checkpoint_folder)
                return
            with tempfile.TemporaryDirectory() as aside:
                place = RemoteFolder(url).child(Path(checkpoint_folder).name).url
                super()._push_from_checkpoint(str(fetch(place, Path(aside), is_of_model)))


class Saving(Pushing):
    """The part of `MerakTrainer` that writes and reads folders."""

    scaler: LossScale | None
    # transformers types these as perhaps None; they are there when the methods below run.
    model: Any
    optimizer: Any
    lr_scheduler: Any
    compute_loss_func: Any
    hp_search_backend: Any
    _planned_files: ModelFiles | None = None
    _saved_step: int
    _check_owner: Callable[[], None] = staticmethod(lambda: None)  # on rank 0, while it trains
    _order: Order | None = None  # of the parameters in the optimizer's groups

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `transformers.Trainer` does, after checking the checkpoint that it resumes from.

        Args:
            resume_from_checkpoint: a checkpoint's folder or URL; True for the newest valid one in
                `checkpoint_url` or `output_dir`; "auto" for that one, or for a new training where
                there is none. By default "auto" if the arguments say so.
            *rest: as in transformers.
            **kwargs: as in transformers.

        Raises:
            ArgumentsError: there is no step to train, or checkpoints cannot be saved.
            WeightsError: there is nothing to resume from, or it is damaged.
            SavingError: a checkpoint could not be written, or another job that runs saves its
                checkpoints in the same `output_dir`.
            TrainingError: other ranks do not train.
        """
        call_the_roll("trainer.train")
        request: object = resume_from_checkpoint
        if request is None and self.args.resume_from_checkpoint == AUTO:
            request = AUTO
        self._compare_ranks(resume_from_checkpoint=request)
        refuse_no_steps(self.args)
        check_output(self, self.mesh)
        with self._owning():
            return self._train(request, *rest, **kwargs)

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """Own the output folder where checkpoints or weights are saved; a collective."""
        folder, saves = Path(str(self.args.output_dir)), saves_checkpoints(self)
        with ExitStack() as stack:

            def own() -> None:
                try:
                    self._check_owner = stack.enter_context(owning(folder, this_job()))
                except SavingError as error:
                    if saves or not isinstance(error.__cause__, OSError):
                        raise
                else:  # a folder that cannot be written is no error where there are no checkpoints
                    remove_partial(folder)

            if saves or leaves_last_weights(self, self.mesh):
                decide_on_rank0(self.mesh, "the owner of output_dir", own)
            yield

    def _train(self, request: object, *rest: Any, **kwargs: Any) -> TrainOutput:
        output_dir = str(self.args.output_dir)
        found = checkpoint_to_resume(
            request,
            output_dir,
            url=self.args.checkpoint_url,
            allow_pickled=self.args.allow_pickled_checkpoint,
        )
        try:
            trained: TrainOutput = super().train(found, *rest, **kwargs)
        except BaseException:
            self._saver.abandon()
            raise
        finally:
            if found is not None:
                remove_fetched(Path(found))
        self._saver.wait()
        return trained

    def _checkpoint_place(self, trial: Any = None) -> str:
        """Folder or URL of the checkpoint of the step that is done."""
        return checkpoint_place(self._run_place(trial), self.state.global_step)

    def _run_place(self, trial: Any = None) -> str:
        """Folder or URL of the run's checkpoints; a trial of a search has one inside of it."""
        folder, url = str(self._get_output_dir(trial=trial)), self.args.checkpoint_url
        if url is None:
            return folder
        inner = Path(folder).relative_to(str(self.args.output_dir)).as_posix()
        return url if inner == "." else RemoteFolder(url).child(inner).url

    @cached_property
    def _num_saves(self) -> Counter[str]:
        """How often this rank has waited for rank 0 to save a folder."""
        return Counter()

    @cached_property
    def _saver(self) -> CheckpointSaver:
        """Saver of this job's checkpoints."""
        return CheckpointSaver(self.mesh, self.args.async_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a folder that `from_pretrained` reads; all ranks call it, and wait for the last.

        Once `train` has left the last weights on disk, rank 0 writes the folder from these, whether
        or not others call it; those that do wait for it.

        Args:
            output_dir: the folder; `args.output_dir` by default.

        Raises:
            SavingError: it could not be written.
            TrainingError: a rank has ended its script without calling it.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        if self._were_left:
            self._save_left(folder)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        call_the_roll("trainer.save_model")
        if self.engine is None:
            step = partial(super().save_model, folder, _internal_call=True)
            on_rank0(step, Path(folder), self.mesh, "model")
        else:
            self._save_parts(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_parts(self, folder: str) -> None:
        """Save the model from the parts that ranks have of it; collective."""
        assert self.engine is not None
        with self.engine.whole_model():
            held = self.engine.held()
            save_pretrained(self.model, held, self.engine.shards, self.mesh, folder)
        on_rank0(partial(self._save_companions, folder), Path(folder), self.mesh, "model")

    def _save_copy(self, whole: nn.Module, folder: str) -> None:
        """Save a copy of the model with all weights, on rank 0."""
        save_whole(whole, folder)
        with writing_into(folder):
            self._save_companions(folder)

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict on rank 0, on the CPU; all ranks call it together.

        Returns:
            Parameters and persistent buffers by name; nothing on other ranks.
        """
        if self._were_left:
            left: dict[str, torch.Tensor] = self.model.state_dict() if self.mesh.rank == 0 else {}
            return left
        call_the_roll("trainer.gather_state_dict")
        if self.engine is None:
            state: dict[str, torch.Tensor] = self.model.state_dict()
            return state if self.mesh.rank == 0 else {}
        return self.engine.gather_state_dict()

    def _save_left(self, folder: str) -> None:
        """Save the last weights, which are on disk, in another folder, on rank 0."""
        assert self.engine is not None
        action = f"{folder} to be saved"
        if self.mesh.rank != 0:
            self._num_saves[action] += 1
            wait_for_rank0(action, self._num_saves[action])
            return
        part = self.engine.part
        self._save_copy(part.last.whole_copy(self.model, part), folder)
        tell_others(action)

    def _leave_last_weights(self, *, also_whole: bool = False) -> None:
        """Leave the last weights on disk, for any rank to read; all ranks come here together.

        Args:
            also_whole: also where every rank has the whole model, since the job ends here.
        """
        engine = self.engine
        if engine is None or self.hp_search_backend is not None:
            return
        if not (also_whole or is_in_parts(engine.part)):
            return
        last = engine.last_weights
        self._saver.wait()
        left = self._agree_on_left(last.folder)
        if left is None and self.args.save_last_weights:
            left = self._write_last_weights(engine)
        elif left is None:
            last.forget("save_last_weights=False, and no checkpoint of the last step is there")
        if left is None:
            return
        self._offer(left.folder, left)
        announce(
            "the weights of step %d are in %s on %s, where state_dict() and save_pretrained() of "
            "the model read them", self.state.global_step, left.folder, left.host,
        )  # fmt: skip

    @contextmanager
    def _saving_before_refusal(self) -> Iterator[None]:
        """Context of batches that all ranks refuse together, behind a save of what is trained."""
        try:
            yield
        except RefusedBatchError:
            self._save_before_refusal()
            raise

    def _save_before_refusal(self) -> None:
        step, place = self.state.global_step, self._checkpoint_place()
        if not step or self._saved_step == step:
            self._saver.wait()
            return
        if saves_checkpoints(self):
            self._save_checkpoint(self.model, None)
            self._saver.wait()
            announce("the batch behind step %d is refused; %s has what is trained", step, place)
        else:
            self._leave_last_weights(also_whole=True)

    def _write_last_weights(self, engine: Engine) -> _Left | None:
        """Write the last weights; None if they cannot be, which is warned of."""
        folder = Path(str(self.args.output_dir)).absolute() / LAST_WEIGHTS
        contents = Contents(
            values={"global_step": self.state.global_step},
            layout=_degrees(self.mesh),
            write_files=lambda written: self._save_companions(str(written)),
            owns_target=True,
        )
        try:
            decide_on_rank0(self.mesh, "the owner of output_dir", self._check_owner)
            with engine.whole_model():
                save_weights(folder, rank_state(engine, self.model, None), contents)
        except WeightsError as error:
            engine.last_weights.forget(f"they could not be written ({error})".rstrip("."))
            warn_on_rank0(
                logger,
                "The last weights could not be left on disk, so state_dict() and save_pretrained() "
                "of the model are refused; trainer.save_model(folder) on all ranks saves it. %s",
                error,
            )
            return None
        return self._agree_on_left(folder)

    def _agree_on_left(self, folder: Path | None) -> _Left | None:
        """What rank 0 finds in a folder with the model's weights; collective."""

        def find() -> _Left | None:
            if folder is None or not (folder / MANIFEST).is_file():
                return None
            return _Left(folder.absolute(), _hash(folder / MANIFEST), socket.gethostname())

        return decide_on_rank0(self.mesh, "the folder of the last weights", find)

    def _offer(self, folder: Path, left: _Left | None = None) -> None:
        """Let methods of the model read its weights from a checkpoint, if this rank sees it."""
        assert self.engine is not None
        host = "rank 0's host" if left is None else left.host
        read: ReadTensors | str = f"they are in {folder} on {host}, not on {socket.gethostname()}"
        with suppress(WeightsError, OSError):
            if left is None or _hash(folder / MANIFEST) == left.manifest:
                read = WholeTensors(folder, MODEL)
        self.engine.last_weights.keep(folder, read)

    def _save_companions(self, folder: str) -> None:
        """Save the tokenizer and the arguments beside the model, as transformers does."""
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        arguments = json.dumps(self.args.to_dict(), indent=2, default=str)
        (Path(folder) / ARGUMENTS_FILE).write_text(arguments + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.engine is None:
            raise ArgumentsError("there is nothing to save before training; call train() first.")
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        place, url = self._checkpoint_place(trial), self.args.checkpoint_url
        folder = Path(self._get_output_dir(trial=trial)) / name_of(place)
        self._note_best(self._run_place(trial), place)
        scaler = {} if self.scaler is None else {"loss_scale": self.scaler.state_dict()}
        contents = Contents(
            values={
                "scheduler": self.lr_scheduler.state_dict(),
                "step_samples": self._step_samples,
                **scaler,
            },
            layout=_degrees(self.mesh) | {"schedule": self.args.schedule, "zero": self.args.zero},
            model_files=self._plan_files(),
            write_files=self._write_files,
            committed=partial(self._remove_old, place, self.state.best_model_checkpoint),
            owns_target=True,
            url=None if url is None else place,
        )
        self._saver.wait()
        decide_on_rank0(self.mesh, "the owner of output_dir", self._check_owner)
        with self.engine.whole_model():
            optimizer = None if self.args.save_only_model else self._inner_optimizer()
            self._saver.save(folder, rank_state(self.engine, self.model, optimizer), contents)
        if url is None:
            self.engine.last_weights.note(folder)
        else:
            self.engine.last_weights.forget(f"they are at {place}")
        if self.args.push_to_hub or self._needs_it_on_save:
            self._saver.wait()
            if url is None:
                self._offer(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """End the training as transformers does, which looks at the checkpoints in the folder."""
        self._saver.wait()
        return cast("TrainOutput", super()._finalize_training(*args, **kwargs))  # type: ignore[no-untyped-call]

    @property
    def _step_samples(self) -> int:
        """Samples of one step of the whole job."""
        each: int = self._train_batch_size * self.args.gradient_accumulation_steps
        return each * self.mesh.dp

    def _plan_files(self) -> ModelFiles | None:
        """Files of the model in every checkpoint, and the ranks that write them; collective."""
        engine, planned = self.engine, self._planned_files
        assert engine is not None
        if planned is None or planned.model is not self.model:  # `model_init` makes new ones
            with engine.whole_model():
                held = find_holders(self.model, engine.held(), engine.shards, self.mesh)
                planned = plan_model_files(self.model, held, self.mesh)
            self._planned_files = planned
        return planned

    def _compare_ranks(self, **further: object) -> None:
        """Refuse arguments and a loss that differ by rank; a collective of all ranks.

        Args:
            **further: what else all ranks must have alike.
        """
        loss = overriding(self, "compute_loss") or self.compute_loss_func
        refuse_different_arguments(self.args, compute_loss=loss, **further)

    @cached_property
    def _needs_it_on_save(self) -> bool:
        """Whether code of the user may look for the checkpoint in the folder once it is saved."""
        own = [] if overriding(self, "_save_checkpoint") is None else [type(self).__name__]
        own += [
            type(callback).__name__
            for callback in self.callback_handler.callbacks
            if overriding(callback, "on_save") is not None
            or (
                type(callback).on_save is not TrainerCallback.on_save
                and not type(callback).__module__.startswith("merak.")
            )
        ]
        if own and self.args.async_save:
            announce(
                "checkpoints are written before training goes on, for what %s does then", own[0]
            )
        return bool(own)

    def _note_best(self, run: str, place: str) -> None:
        """Note the folder or URL of the best checkpoint so far, as transformers does."""
        steps = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        if self.args.save_strategy in steps and self.state.best_global_step:
            best = checkpoint_place(run, self.state.best_global_step)
            if best == place or self._saver.is_saving(best) or is_there(best):
                self.state.best_model_checkpoint = best

    def _write_files(self, folder: Path) -> None:
        """Write what a checkpoint holds beside weights and the ranks' shards, on rank 0."""
        self._save_companions(str(folder))
        for one in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(one, ExportableState):
                continue
            name = type(one).__name__
            known: dict[str, Any] = cast("dict[str, Any]", self.state.stateful_callbacks)
            if isinstance(known.get(name), list):
                known[name].append(one.state())
            else:
                known[name] = one.state()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _remove_old(self, newest: str, best: str | None) -> None:
        """Keep as many checkpoints as asked for, the newest and the best among them."""
        for place in outdated(newest, best, self.args.save_total_limit):
            remove_checkpoint(place)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are loaded once the ranks have their segments, with the optimizer's state."""
        allowed = self.args.allow_pickled_checkpoint
        saved = open_checkpoint(Path(resume_from_checkpoint), allowed)
        known = None if self.engine is None else self.engine.description
        check_model(saved, known or describe_model(self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = self._inner_optimizer()
        values = self._load_ranks(checkpoint, optimizer)
        self.lr_scheduler.load_state_dict(values["scheduler"])
        samples = values.get("step_samples", self._step_samples)  # none in earlier checkpoints
        if samples != self._step_samples:
            warn_on_rank0(
                logger,
                "%s is of a job with %d samples a step, and this one has %d, so it goes on at "
                "another place of the data; set global_batch=%d to keep them on any number of "
                "ranks.", checkpoint, samples, self._step_samples, samples,
            )  # fmt: skip
        for number, group in enumerate(optimizer.param_groups):
            if not group["params"]:  # of which no parameter of this rank tells the learning rate
                group["lr"] = self.lr_scheduler.get_last_lr()[number]
        if self.scaler is not None and "loss_scale" in values:  # else it was without fp16
            self.scaler.load_state_dict(values["loss_scale"])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        self._saver.wait()
        with opened(best) as folder:
            self._load_ranks(str(folder), None)

    def _load_ranks(
        self, checkpoint: str, optimizer: torch.optim.Optimizer | None
    ) -> Mapping[str, Any]:
        """Load parameters, and the optimizer if one is given; returns the small values."""
        assert self.engine is not None
        with self.engine.whole_model():
            state = rank_state(self.engine, self.model, optimizer)
            state = replace(state, order=self._order)
            values = load_state(Path(checkpoint), state, self.args.allow_pickled_checkpoint)
        if is_fetched(Path(checkpoint)):
            forget_tensors(Path(checkpoint))
        else:
            self.engine.last_weights.note(Path(checkpoint))
        return values

    def _inner_optimizer(self) -> Any:
        """The optimizer itself, inside accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: the loss scale is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: random state is keyed by step and sample."""


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _degrees(mesh: Mesh) -> dict[str, int]:
    """The degrees of a job, as its checkpoints state them."""
    axes = ("dp", "tp", "pp", "cp") if mesh.cp > 1 else ("dp", "tp", "pp")
    return {axis: getattr(mesh, axis) for axis in axes}

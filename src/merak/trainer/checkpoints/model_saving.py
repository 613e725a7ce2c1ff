"""The model of a training, saved: as a folder, on the hub, and as its last weights on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from merak.checkpoint.manifest import MANIFEST, MODEL
from merak.checkpoint.pretrained.export import is_of_model
from merak.checkpoint.pretrained.whole_tensors import WholeTensors
from merak.checkpoint.remote.fetching import (
    fetch,
)
from merak.checkpoint.remote.folder import RemoteFolder
from merak.checkpoint.save_pretrained import on_rank0, save_pretrained, save_whole
from merak.checkpoint.saver import CheckpointSaver, Contents, save_weights
from merak.checkpoint.writing import writing_into
from merak.core.announce import announce
from merak.core.errors import WeightsError
from merak.core.health.roll_call import call_the_roll, tell_others, wait_for_rank0
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0, failing_together, warn_on_rank0
from merak.engine import Engine
from merak.engine.rank_state import rank_state
from merak.graph.weights.laid_out import ReadTensors, is_in_parts
from merak.trainer.logs import Logging

logger = logging.getLogger(__name__)

_PUSH = "push to the hub"

LAST_WEIGHTS = "last-weights"
"""Folder of the last weights in a job's output folder."""

ARGUMENTS_FILE = "training_args.json"
"""Arguments of a job beside its model, for people."""


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


class ModelSaving(Pushing):
    """The part of `MerakTrainer` that saves the model, from the parts that ranks have of it."""

    # transformers types these as perhaps None; they are there when the methods below run.
    model: Any
    hp_search_backend: Any
    _check_owner: Callable[[], None] = staticmethod(lambda: None)  # on rank 0, while it trains

    @cached_property
    def _saver(self) -> CheckpointSaver:
        """Saver of this job's checkpoints."""
        return CheckpointSaver(self.mesh, self.args.async_save)

    @cached_property
    def _num_saves(self) -> Counter[str]:
        """How often this rank has waited for rank 0 to save a folder."""
        return Counter()

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

    def _write_last_weights(self, engine: Engine) -> _Left | None:
        """Write the last weights; None if they cannot be, which is warned of."""
        folder = Path(str(self.args.output_dir)).absolute() / LAST_WEIGHTS
        contents = Contents(
            values={"global_step": self.state.global_step},
            layout=degrees(self.mesh),
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


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def degrees(mesh: Mesh) -> dict[str, int]:
    """The degrees of a job, as its checkpoints state them."""
    axes = ("dp", "tp", "pp", "cp") if mesh.cp > 1 else ("dp", "tp", "pp")
    return {axis: getattr(mesh, axis) for axis in axes}

"""Export of a checkpoint in one process: the Hugging Face folder that it holds, checked and copied.

Nothing is unpickled, no model is built, and no more than one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers.core_model_loading import dot_natural_key

from merak.checkpoint.files import damage, inner_files
from merak.checkpoint.manifest import MANIFEST, read_manifest
from merak.checkpoint.pretrained.averages import StoredAverages
from merak.checkpoint.pretrained.placing import written_folder
from merak.checkpoint.pretrained.splitting import (
    ADAPTER,
    INDEX,
    index_text,
    is_weights,
    split_files,
)
from merak.checkpoint.pretrained.tensor_file import (
    DamagedFile,
    TensorFile,
    check_file,
    lay_out,
    read_layout,
    read_tensor,
)
from merak.checkpoint.pretrained.trainer_files import (
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from merak.core.errors import SavingError, WeightsError
from merak.core.files.json_file import read_json
from merak.core.tensor_meta import TensorMeta

CONFIG = "config.json"
EARLIER_FOLDER = "merak"
"""Folder of the ranks' shards in checkpoints of the format before the manifest."""

_OF_TRAINING = {
    MANIFEST,
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    "training_args.json",
}
_CHUNK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Exported:
    """Files, step and sizes of an exported model.

    Args:
        files: names of all files, in their order.
        parameters: elements of all tensors in them.
        num_bytes: of all files.
    """

    files: tuple[str, ...]
    parameters: int
    num_bytes: int

    @classmethod
    def of(cls, folder: Path, parameters: int) -> Exported:
        """Describe a folder that has been written.

        Args:
            folder: of the exported model.
            parameters: elements of all tensors in it.
        """
        files = tuple(inner_files(folder))
        return cls(files, parameters, sum((folder / name).stat().st_size for name in files))


@dataclass(frozen=True, slots=True)
class _Source:
    """Tensor of a checkpoint's Hugging Face files.

    Args:
        file: its file.
        begin: its first byte in the file.
        meta: its shape and type.
        averaged: gives the average that is exported in its place; None for itself.
    """

    file: Path
    begin: int
    meta: TensorMeta
    averaged: Callable[[], torch.Tensor] | None = None

    def read(self) -> torch.Tensor:
        """What is exported."""
        if self.averaged is not None:
            return self.averaged()
        return read_tensor(self.file, self.begin, self.meta)


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    *,
    max_shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    average: bool = False,
) -> Exported:
    """Export a checkpoint as the folder that `trainer.save_model` would have written.

    Args:
        checkpoint: its folder, of any layout.
        target: the folder to write.
        max_shard_size: the most bytes of a file; None for the files of the checkpoint.
        dtype: type of floating point tensors; None for their own.
        overwrite: replace files of a target that is not empty; others that are in it stay.
        average: export the moving averages of its parameters in their place.

    Returns:
        What was written.

    Raises:
        WeightsError: there is no checkpoint, it is damaged or holds no model, or the target is not
            empty or lies inside it.
        SavingError: the target cannot be written.
    """
    check_target(checkpoint, target, overwrite)
    names = _model_files(checkpoint)
    stored = {name: _read_header(checkpoint, name) for name in names if _holds_tensors(name)}
    _check_index(checkpoint, names)
    averages = _with_averages(checkpoint, stored) if average else None
    _check_room(sum((checkpoint / name).stat().st_size for name in names), target)
    with written_folder(target) as unfinished:
        written: set[str] = set()
        try:
            if max_shard_size is not None or dtype is not None or averages is not None:
                written = _write_again(
                    checkpoint, unfinished, averages or stored, max_shard_size, dtype
                )
            for name in names:
                if name not in written and not (written and name in (*stored, INDEX)):
                    _copy(checkpoint / name, unfinished / name)
        except DamagedFile as error:
            raise _damaged(checkpoint, str(error)) from error
        metas = [source.meta for sources in stored.values() for source in sources.values()]
        return Exported.of(unfinished, sum(math.prod(meta.shape) for meta in metas))


def check_target(checkpoint: Path, target: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or must not be.

    Args:
        checkpoint: that is exported.
        target: the folder.
        overwrite: as of `export_checkpoint`.

    Raises:
        WeightsError: it is a file, is not empty, or lies inside the checkpoint.
    """
    place, source = target.resolve(), checkpoint.resolve()
    if place == source or source in place.parents:
        raise WeightsError(
            f"{target} is inside the checkpoint {checkpoint}, which must stay as it was written; "
            "name a folder outside it."
        )
    if target.exists() and not target.is_dir():
        raise WeightsError(f"{target} is a file; name a folder to write.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise WeightsError(
            f"{target} is there already and is not empty; name another folder, or replace its "
            "files with --overwrite."
        )


def _model_files(checkpoint: Path) -> list[str]:
    """Names of the files of a checkpoint that are its model's, unharmed."""
    if not checkpoint.is_dir():
        raise WeightsError(f"{checkpoint} is no folder; name a checkpoint-… folder.")
    if (checkpoint / MANIFEST).is_file():
        files = read_manifest(checkpoint).files
        names = [name for name in sorted(files) if is_of_model(name)]
        if (problem := damage(checkpoint, files, names)) is not None:
            raise _damaged(checkpoint, problem)
    elif (checkpoint / EARLIER_FOLDER / ".metadata").is_file():
        names = [name for name in inner_files(checkpoint) if is_of_model(name)]
    else:
        raise WeightsError(
            f"{checkpoint} is no checkpoint of Merak ({MANIFEST}, which is written last, is "
            "missing); name a checkpoint-… folder."
        )
    if not any(map(_holds_tensors, names)):
        raise WeightsError(
            f"{checkpoint} holds no model files that could be exported; export another checkpoint."
        )
    return names


def is_of_model(name: str) -> bool:
    """Whether a file of a checkpoint is its model's, and not its training's.

    Args:
        name: of the file, in its folder.
    """
    if name in _OF_TRAINING or name.startswith(("rank-", f"{EARLIER_FOLDER}/", "rng_state")):
        return False
    return not any(part.startswith(".") for part in name.split("/"))


def _holds_tensors(name: str) -> bool:
    return is_weights(name) or Path(name).name == ADAPTER


def _read_header(checkpoint: Path, name: str) -> dict[str, _Source]:
    """The tensors of a file by key."""
    try:
        metas, begins = read_layout(checkpoint / name)
    except DamagedFile as error:
        raise _damaged(checkpoint, str(error)) from error
    return {key: _Source(checkpoint / name, begins[key], meta) for key, meta in metas.items()}


def _with_averages(
    checkpoint: Path, stored: Mapping[str, Mapping[str, _Source]]
) -> dict[str, dict[str, _Source]]:
    """The tensors of the model's files, of which averages are read in the place of parameters."""
    averages = StoredAverages(checkpoint)
    names = averages.names_of((file, key) for file, sources in stored.items() for key in sources)
    found = {file: dict(sources) for file, sources in stored.items()}
    for (file, key), name in names.items():
        found[file][key] = replace(found[file][key], averaged=partial(averages.read, name))
    return found


def _check_index(checkpoint: Path, names: list[str]) -> None:
    """Check that the index names the files that are there, and no others."""
    if INDEX not in names:
        return
    try:
        index = read_json(checkpoint / INDEX)
        named = set(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise _damaged(checkpoint, f"{INDEX} cannot be read") from cause
    if odd := sorted(map(str, named ^ set(filter(is_weights, names)))):
        place = "is missing" if odd[0] in named else f"is not in {INDEX}"
        raise _damaged(checkpoint, f"{odd[0]} {place}")


def _check_room(num_bytes: int, target: Path) -> None:
    there = next(place for place in (target, *target.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise SavingError(
            f"{target} needs {num_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there; "
            "make room, or name a folder on another disk."
        )


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as read, open(place, "xb") as written:
        shutil.copyfileobj(read, written, _CHUNK_BYTES)
    if place.stat().st_size != source.stat().st_size:
        raise DamagedFile(f"{source.name} has changed while it was copied")


def _write_again(
    checkpoint: Path,
    folder: Path,
    stored: Mapping[str, Mapping[str, _Source]],
    max_shard_size: int | None,
    dtype: torch.dtype | None,
) -> set[str]:
    """Write tensors, index and config in files of other sizes or another type; their names."""
    files = {name: dict(sources) for name, sources in stored.items() if not is_weights(name)}
    weights = {name: stored[name] for name in stored if is_weights(name)}
    every = {key: source for sources in weights.values() for key, source in sources.items()}
    metas = {key: _converted(every[key].meta, dtype) for key in sorted(every, key=_natural)}
    if max_shard_size is not None and weights:
        split, index = split_files(metas, max_shard_size)
        files |= {name: {key: every[key] for key in keys} for name, keys in split.items()}
    else:
        files |= {name: dict(sources) for name, sources in weights.items()}
        index = index_text(metas, weights) if len(weights) > 1 else None
    for name, sources in files.items():
        _write_file(folder / name, sources, dtype)
    written = set(files)
    if index is not None:
        (folder / INDEX).write_text(index, encoding="utf-8")
        written.add(INDEX)
    if dtype is not None and (checkpoint / CONFIG).is_file():
        try:
            config = dict(read_json(checkpoint / CONFIG, finite=False))
        except (ValueError, TypeError) as cause:
            raise _damaged(checkpoint, f"{CONFIG} cannot be read") from cause
        config["dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        written.add(CONFIG)
    return written


def _write_file(path: Path, sources: Mapping[str, _Source], dtype: torch.dtype | None) -> None:
    metas = {key: _converted(source.meta, dtype) for key, source in sources.items()}
    layout = lay_out(metas)
    path.parent.mkdir(exist_ok=True)
    file = TensorFile(path, layout)
    try:
        for key, source in sources.items():
            file.write(key, source.read().to(metas[key].dtype))
        file.close()
    except BaseException:
        file.abandon()
        raise
    check_file(path, layout)


def _natural(key: str) -> tuple[object, ...]:
    return tuple(dot_natural_key(key))


def _converted(meta: TensorMeta, dtype: torch.dtype | None) -> TensorMeta:
    is_float = meta.dtype.is_floating_point and meta.dtype.itemsize > 1
    return TensorMeta(meta.shape, dtype if dtype is not None and is_float else meta.dtype)


def _damaged(checkpoint: Path, what: str) -> WeightsError:
    return WeightsError(f"{checkpoint} is damaged ({what}); export another checkpoint.")

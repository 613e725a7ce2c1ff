"""Export of a checkpoint of adapters as a whole model, into whose weights peft has merged them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from merak.checkpoint.manifest import MANIFEST
from merak.checkpoint.pretrained.export import (
    Exported,
    check_target,
    export_checkpoint,
    is_of_model,
)
from merak.checkpoint.pretrained.placing import written_folder
from merak.checkpoint.pretrained.splitting import ADAPTER, ADAPTER_CONFIG
from merak.core.errors import WeightsError
from merak.core.files.json_file import read_json
from merak.core.packages import refuse_missing


def export_merged(
    checkpoint: Path,
    target: Path,
    load_base: Callable[[str], Any],
    base: str | None = None,
    *,
    max_shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    average: bool = False,
) -> Exported:
    """Export a checkpoint of adapters as a whole model: one process, with all of it in memory.

    Args:
        checkpoint: its folder, of any layout, or one that `save_model` has written.
        target: the folder to write.
        load_base: loads the model that the adapters were trained beside, by its name.
        base: that name; None for the one that the adapters name.
        max_shard_size: the most bytes of a file; None as transformers has it.
        dtype: type of floating point weights; None for the base's own.
        overwrite: as of `export_checkpoint`.
        average: merge the moving averages of the adapters in their place.

    Returns:
        What was written.

    Raises:
        WeightsError: the checkpoint holds no adapters, they name no base, or do not fit it; and as
            of `export_checkpoint`.
        SavingError: the target cannot be written.
        PackageError: peft is not installed.
    """
    refuse_missing("peft", "export --merge")
    check_target(checkpoint, target, overwrite)
    with TemporaryDirectory() as folder:
        adapters, names = _adapters(checkpoint, Path(folder) / "adapters", average)
        model = _merged(adapters, load_base, base)
        with written_folder(target) as unfinished:
            size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            (model if dtype is None else model.to(dtype)).save_pretrained(unfinished, **size)
            for name in names:
                place = unfinished / name
                if name not in _OF_ADAPTERS and not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(adapters / name, place)
            return Exported.of(unfinished, sum(own.numel() for own in model.parameters()))


def _adapters(checkpoint: Path, place: Path, average: bool) -> tuple[Path, list[str]]:
    """A folder with the adapters of a checkpoint, or of a saved model, and its model's files."""
    is_saved = (checkpoint / ADAPTER_CONFIG).is_file() and not (checkpoint / MANIFEST).is_file()
    if is_saved and not average:
        names = [
            own.name for own in checkpoint.iterdir() if own.is_file() and is_of_model(own.name)
        ]
        return checkpoint, names
    found = export_checkpoint(checkpoint, place, average=average)
    if ADAPTER not in found.files:
        raise WeightsError(f"{checkpoint} holds a whole model and no adapters; leave --merge out.")
    return place, list(found.files)


_OF_ADAPTERS = (ADAPTER, ADAPTER_CONFIG, "README.md")
"""Files that are not those of the whole model."""


def _merged(adapters: Path, load_base: Callable[[str], Any], base: str | None) -> Any:
    """The base with adapters merged into its weights, by peft."""
    from peft import PeftModel

    name = base or read_json(adapters / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not name:
        raise WeightsError(
            "the adapters do not name the model that they were trained beside; give its folder, or "
            "its name on the hub, with --base."
        )
    model = load_base(name)
    try:
        adapted = PeftModel.from_pretrained(model, str(adapters))
        if (merge := getattr(adapted, "merge_and_unload", None)) is None:
            raise NotImplementedError
        return merge(safe_merge=True)
    except NotImplementedError as cause:
        kind = read_json(adapters / ADAPTER_CONFIG).get("peft_type")
        raise WeightsError(
            f"adapters of kind {kind} change no weights that they could be merged into, as peft "
            "has it; leave --merge out, and load what is exported beside the model with "
            "peft.PeftModel.from_pretrained."
        ) from cause
    except (ValueError, RuntimeError, KeyError, AttributeError) as cause:
        problem = (" ".join(str(cause).split()) or type(cause).__name__).rstrip(".")[:300]
        raise WeightsError(
            f"the adapters cannot be merged into {name}: {problem}; give the model that they were "
            "trained beside with --base."
        ) from cause

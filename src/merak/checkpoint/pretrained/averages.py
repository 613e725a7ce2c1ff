"""The moving averages of parameters that a checkpoint has, in the place of its model's weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from merak.checkpoint.files import damage
from merak.checkpoint.manifest import MODEL, Manifest, StoredTensor, read_manifest
from merak.checkpoint.optimizer_state import AVERAGE, PREFIX, split_key
from merak.checkpoint.pretrained.splitting import ADAPTER
from merak.checkpoint.pretrained.tensor_file import read_layout, read_tensor
from merak.checkpoint.values import dtype_of
from merak.core.errors import WeightsError


class StoredAverages:
    """The averages of a checkpoint, read one at a time.

    Args:
        checkpoint: its folder.

    Attributes:
        names: of the parameters that have one.

    Raises:
        WeightsError: it has none, or is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        manifest = read_manifest(checkpoint)
        self._stored = {
            split_key(key)[0]: tensor
            for key, tensor in manifest.tensors.items()
            if key.startswith(PREFIX) and split_key(key)[1] == AVERAGE
        }
        if not self._stored:
            raise WeightsError(
                f"{checkpoint} has no averages of its parameters; train with ema_decay, such as "
                "0.999, or leave --average out."
            )
        self.names = self._stored.keys()
        files = {box.file for tensor in self._stored.values() for box in tensor.boxes}
        if (problem := damage(checkpoint, manifest.files, sorted(files))) is not None:
            raise WeightsError(f"{checkpoint} is damaged ({problem}); export another checkpoint.")
        self._layouts = {name: read_layout(checkpoint / name) for name in files}
        self._keys = _keys(manifest, self.names)
        # peft leaves the name of the adapter out, one of the parts of a parameter's.
        self._adapters = {
            ".".join([*parts[:n], *parts[n + 1 :]]): name
            for name in self.names
            for parts in [name.split(".")]
            for n in range(1, len(parts))
        }

    def names_of(self, tensors: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """The parameters whose averages replace tensors of the model's files.

        Args:
            tensors: file and key of each.

        Raises:
            WeightsError: an average is of a parameter that no file has as it is.
        """
        found = {}
        for file, key in tensors:
            name = self._keys.get((file, key))
            if name is None and Path(file).name == ADAPTER:
                name = self._adapters.get(key)
            if name is not None:
                found[file, key] = name
        if missing := sorted(self.names - set(found.values())):
            raise WeightsError(
                f"{missing[0]} of {self._folder} is converted where from_pretrained reads it, and "
                "so cannot be replaced by its average; save the model in the job, within "
                "merak.averaged_parameters(model), or export the averages with --format dcp."
            )
        return found

    def read(self, name: str) -> torch.Tensor:
        """The whole average of a parameter."""
        stored = self._stored[name]
        whole = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        for box in stored.boxes:
            place = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            metas, begins = self._layouts[box.file]
            file = self._folder / box.file
            whole[place] = read_tensor(file, begins[box.key], metas[box.key]).view(box.shape)
        return whole


def _keys(manifest: Manifest, names: Iterable[str]) -> dict[tuple[str, str], str]:
    """The averaged parameters whose tensor a file of the checkpoint has as it is, by its place."""
    found = {}
    for name in names:
        stored = manifest.tensors.get(f"{MODEL}{name}")
        if stored is not None and _is_whole(stored):
            found[stored.boxes[0].file, stored.boxes[0].key] = name
    return found


def _is_whole(stored: StoredTensor) -> bool:
    return len(stored.boxes) == 1 and stored.boxes[0].shape == stored.shape

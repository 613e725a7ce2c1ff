"""Columns of Python objects, such as the boxes of each image: packed as words, a row a sample.

A batch may have a list with an object for each sample: a dict of tensors of any sizes, or a tensor.
Ranks send, cut and compare columns that are tensors. So such a list becomes one, of a type that no
operator computes with; code that runs as Python on real values gets the list back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from merak.core.errors import DataError

OBJECTS = torch.complex128
"""Element type of such columns, (samples, words): how many bytes are used, and these.

Of the types that any tensor may be sent as, it is the one that batches have not.
"""

_LEAST_WORDS = 64
_WORD_BYTES = OBJECTS.itemsize


def are_objects(value: Any) -> bool:
    """Whether a column is a list with an object for each sample."""
    kinds = (Mapping, torch.Tensor)
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(one, kinds) for one in value)
    )


def pack_objects(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Pack those columns of a batch that are lists of objects.

    Args:
        batch: by column.

    Raises:
        DataError: a tensor is of the type that stands for objects.
    """
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dtype is OBJECTS:
            raise DataError(
                f"column {name!r} of the batch is a tensor of {OBJECTS}, which Merak packs lists "
                "of objects in; give it as torch.complex64, or its real and imaginary part."
            )
    return {name: packed(v) if are_objects(v) else v for name, v in batch.items()}


def unpack_objects(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch that `pack_objects` was given, with tensors on the columns' devices."""
    is_packed = {name: isinstance(v, torch.Tensor) and v.dtype is OBJECTS
                 for name, v in batch.items()}  # fmt: skip
    return {name: unpacked(v) if is_packed[name] else v for name, v in batch.items()}


def packed(objects: Sequence[Any], num_words: int = 0) -> torch.Tensor:
    """Objects as rows of words, of as many as a power of two for few shapes of columns.

    Args:
        objects: one for each sample.
        num_words: of a row; 0 for as many as the largest object takes.

    Returns:
        (samples, words), on the device of their tensors.

    Raises:
        DataError: an object holds what cannot be sent to another process.
        ValueError: one takes more words.
    """
    devices = {torch.device("cpu")}

    def kept(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
        devices.add(tensor.device)
        own = tensor.detach().cpu().contiguous()
        content = own.reshape(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b""
        return content, own.dtype, tuple(own.shape)

    try:
        texts = [_dumps(one, kept) for one in objects]
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"a list of the batch holds what cannot be sent to other processes ({error}); let it "
            "hold dicts of tensors, numbers and strings."
        ) from error
    needed, size = max(map(len, texts)) + _WORD_BYTES, num_words or _LEAST_WORDS
    while not num_words and size * _WORD_BYTES < needed:
        size *= 2
    if size * _WORD_BYTES < needed:
        raise ValueError(f"{needed} bytes in {size} words")
    rows = (len(text).to_bytes(_WORD_BYTES, "little") + text for text in texts)
    whole = b"".join(row.ljust(size * _WORD_BYTES, b"\0") for row in rows)
    found = torch.frombuffer(bytearray(whole), dtype=OBJECTS).view(len(texts), size)
    return found.to(max(devices, key=lambda device: device.type != "cpu"))


def unpacked(rows: torch.Tensor, most: int | None = None) -> list[Any]:
    """The objects of some rows.

    Args:
        rows: as of `packed`.
        most: entries of each tensor's first dim that are kept; None for all.
    """

    def tensor(kept: tuple[bytes, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        content, dtype, shape = kept
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0)
        found = flat.to(dtype).view(shape)
        return (found[:most] if shape else found).to(rows.device)

    whole = [row.numpy().tobytes() for row in rows.cpu()]
    ends = [_WORD_BYTES + int.from_bytes(row[:_WORD_BYTES], "little") for row in whole]
    return [_loads(r[_WORD_BYTES:end], tensor) for r, end in zip(whole, ends, strict=True)]


def fitted(rows: torch.Tensor, num_rows: int, num_words: int) -> torch.Tensor:
    """Rows of another shape: objects are repeated, and their tensors cut until they have room.

    Args:
        rows: as of `packed`.
        num_rows: how many there are to be.
        num_words: of each.
    """
    most: int | None = None
    while True:
        objects = unpacked(rows, most)
        try:
            return packed([objects[i % len(objects)] for i in range(num_rows)], num_words)
        except ValueError:
            if most == 0:
                raise
            most = num_words if most is None else most // 2


# ---- layouts ----


def layouts_of(objects: Sequence[Any]) -> bytes:
    """Description of objects, with shapes and types of tensors in place of their values."""
    return _dumps(list(objects), lambda tensor: (tuple(tensor.shape), tensor.dtype))


def of_layouts(text: bytes, device: torch.device) -> list[Any]:
    """Objects of a description, whose tensors have no values.

    Args:
        text: as of `layouts_of`.
        device: of the tensors.
    """

    def tensor(layout: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
        return torch.empty(layout[0], dtype=layout[1], device=device)

    found: list[Any] = _loads(text, tensor)
    return found


def tensors_in(objects: Any) -> list[torch.Tensor]:
    """The tensors in objects, in order."""
    found: list[torch.Tensor] = []
    _dumps(objects, found.append)
    return found


def _dumps(value: Any, kept: Callable[[torch.Tensor], Any]) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> Any:
            return [kept(one)] if isinstance(one, torch.Tensor) else None

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _loads(text: bytes, made: Callable[[Any], torch.Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, kept: Any) -> torch.Tensor:
            return made(kept[0])

    return Unpickler(io.BytesIO(text)).load()

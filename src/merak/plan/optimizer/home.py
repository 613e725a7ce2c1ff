"""Where an optimizer's states are: on the device, in host memory, or in files of a folder.

What leaves the device are the states, float32 masters, and gradients once they are reduced. The
processor steps, and sends updated parameters back.

Sources: arXiv 2101.06840 (ZeRO-Offload), section 4; arXiv 2104.07857 (ZeRO-Infinity), section 5.2.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import pairwise

from merak.core.errors import ArgumentsError

HOST = "cpu"
"""The value of `offload_optimizer` for host memory."""

PART_BYTES = 64 * 2**20
"""Bytes of optimizer tensors that are stepped at a time, and then sent while the next are."""

MOST_SENT = 2
"""Parts that may be on their way to the device, beside the one that is stepped."""

_PARTS_IN_MEMORY = 4
"""Parts of the states in files that are in memory: read ahead, stepped, and two being written."""

_STATES_OF_TENSOR = 3
"""Tensors that are read of one that is stepped: itself, and the two moments of Adam."""

_DEVICE = (None, "off")


def read_home(given: object) -> object:
    """The option `offload_optimizer` as one of its values: None or "off", "cpu", or a folder.

    Args:
        given: as a user writes it; what is no text or path is given back as it is.

    Raises:
        ArgumentsError: it is none of them.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    named = str(os.fspath(given))
    if named not in (HOST, *_DEVICE) and os.sep not in named:
        raise ArgumentsError(
            f"offload_optimizer={given!r} is no place for an optimizer's states; use 'cpu' for "
            "host memory, the path of a folder, such as './states', or 'off'."
        )
    return named


def is_away(home: str | None) -> bool:
    """Whether the states are not on the device.

    Args:
        home: as of `read_home`.
    """
    return home not in _DEVICE


def folder_of(home: str | None) -> str | None:
    """The folder that holds the states; None where they are in memory.

    Args:
        home: as of `read_home`.
    """
    return home if is_away(home) and home != HOST else None


def steps_beside_backward(*, clips: bool, scales: bool, skips: bool, locates: bool) -> bool:
    """Whether a tensor may be stepped in host memory before all gradients of a step are known.

    Its gradient is final once the last microbatch's backward of its segment, and the reduction over
    replicas, have ended. It waits for all others where these decide on the step.

    Args:
        clips: whether gradients are clipped by the norm of all of them.
        scales: whether fp16's loss scale may have overflowed in any of them.
        skips: whether a step that is not finite is left out (`nan_policy="skip"`).
        locates: whether such a step runs once more, on the same weights (`locate_nan`).
    """
    return not (clips or scales or skips or locates)


def in_parts(sizes: Sequence[int], is_open: bool = False) -> list[range]:
    """Numbers of the tensors that are stepped at a time, in order, of `PART_BYTES` or more.

    Args:
        sizes: bytes of each tensor that is stepped.
        is_open: whether more tensors come: the last part is what is not enough for one, or empty.
    """
    starts, held = list[int](), PART_BYTES
    for number, num_bytes in enumerate(sizes):
        if held >= PART_BYTES:
            starts.append(number)
            held = 0
        held += num_bytes
    found = [range(*own) for own in pairwise([*starts, len(sizes)])]
    if is_open and held >= PART_BYTES:
        found.append(range(len(sizes), len(sizes)))
    return found


def shared_out(home: str | None, sizes: Collection[int]) -> tuple[int, int]:
    """Bytes of what is away, in host memory at most and in files.

    Args:
        home: as of `read_home`.
        sizes: bytes of each tensor with its states and gradient.
    """
    total = sum(sizes)
    if folder_of(home) is None:
        return total, 0
    part = PART_BYTES * _STATES_OF_TENSOR + max(sizes, default=0)
    return min(total, _PARTS_IN_MEMORY * part), total

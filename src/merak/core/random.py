"""Random state that does not depend on the layout: every draw is keyed by what it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(*key: int | str) -> int:
    """A seed, the same on every rank and machine, for what `key` names.

    Args:
        key: for instance (job seed, "dropout", step, microbatch, segment).

    Returns:
        A seed in 0 … 2⁶³ − 1.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_random_state(device: torch.device, *key: int | str) -> None:
    """Seed the default generator of one device from `key`; nothing is synchronised.

    Args:
        device: the device whose draws follow.
        key: as for `seed_for`.
    """
    seed = seed_for(*key)
    if device.type == "cuda":
        torch.cuda.init()  # without which there are no generators
        torch.cuda.default_generators[_index(device)].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _index(device: torch.device) -> int:
    """The number of a GPU; the current one's where none is said."""
    return torch.cuda.current_device() if device.index is None else device.index


def random_state(device: torch.device) -> torch.Tensor:
    """Where the default generator of a device stands; see `restore_random_state`."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Let the default generator of a device go on from where it stood."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Draws inside leave the default generator of a device, the user's, as it was."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(device, state)

"""Random state that does not depend on the layout: every seed is keyed by its purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(*key: int | str) -> int:
    """Return a seed, the same on every rank and machine, for a key.

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
    """Return the number of a GPU; the current one's where the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator; see `restore_random_state`."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Restore the default generator of a device, the user's, after random draws inside."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(device, state)

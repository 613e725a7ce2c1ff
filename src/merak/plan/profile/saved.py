"""Profiles in the cache: found again by jobs on equal devices, hosts and torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from merak.core.files.private_files import read_cached, write_own_file
from merak.plan.profile.profile import Profile
from merak.plan.profile.profile_file import profile_from, profile_text

logger = logging.getLogger(__name__)


def save_for_jobs(folder: Path, profile: Profile) -> None:
    """Save a profile for later jobs; a folder that cannot be written is left as it is.

    Args:
        folder: of the cache.
        profile: measured by ranks with this process's number of threads.
    """
    path = _path(folder, profile.machine.device, dict(profile.hosts))
    try:
        write_own_file(path, profile_text(profile).encode())
    except OSError as error:
        logger.warning("the profile is not kept for other jobs: %s", error)


def find_saved(folder: Path, device: str, hosts: Mapping[str, int]) -> Profile | None:
    """The profile of equal devices on as many hosts, with this torch; None where there is none.

    Args:
        folder: of the cache.
        device: name of the devices.
        hosts: ranks of every host.
    """
    path = _path(folder, device, hosts)
    found = read_cached(
        path,
        lambda content: profile_from(content.decode(), path.name),
        "profile",
        logger.warning,
    )
    if found is not None and (found.machine.device, found.machine.torch) != (
        device,
        torch.__version__,
    ):
        return None
    return found


def _path(folder: Path, device: str, hosts: Mapping[str, int]) -> Path:
    ranks = sorted(hosts.values())
    what = (device, torch.__version__, str(torch.get_num_threads()), *map(str, ranks))
    key = hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]
    return folder / "profiles" / f"{key}.json"

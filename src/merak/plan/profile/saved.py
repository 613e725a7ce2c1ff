"""Profiles in the cache: found again by jobs on equal devices, hosts and torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from merak.core.errors import PlanError
from merak.core.private_files import private_folder
from merak.plan.profile.profile import Profile
from merak.plan.profile.profile_file import load_profile, save_profile

logger = logging.getLogger(__name__)


def save_for_jobs(folder: Path, profile: Profile) -> None:
    """Save a profile for later jobs; a folder that cannot be written is left as it is.

    Args:
        folder: of the cache.
        profile: measured by ranks with this process's number of threads.
    """
    path = _path(folder, profile.machine.device, dict(profile.hosts))
    try:
        private_folder(path.parent)
        save_profile(path, profile)
    except (OSError, PlanError) as error:
        logger.warning("the profile is not kept for other jobs: %s", error)


def find_saved(folder: Path, device: str, hosts: Mapping[str, int]) -> Profile | None:
    """The profile of equal devices on as many hosts, with this torch; None where there is none.

    Args:
        folder: of the cache.
        device: name of the devices.
        hosts: ranks of every host.
    """
    path = _path(folder, device, hosts)
    if not path.is_file():
        return None
    with suppress(PlanError):  # a damaged file is measured anew
        found = load_profile(path)
        if found.machine.device == device and found.machine.torch == torch.__version__:
            return found
    return None


def _path(folder: Path, device: str, hosts: Mapping[str, int]) -> Path:
    ranks = sorted(hosts.values())
    what = (device, torch.__version__, str(torch.get_num_threads()), *map(str, ranks))
    key = hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]
    return folder / "profiles" / f"{key}.json"

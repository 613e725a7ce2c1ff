"""Plan files, as far as ranks read them before a model is known: format, checksum and degrees."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from merak.core.elastic import GivenDegrees
from merak.core.errors import PlanError
from merak.core.files.json_file import UnreadableFile, read_json

_FORMAT, _VERSION = "merak-plan", 2

_PLANNED = ("candidate", "price")
"""Fields of a plan file that say what was planned; the others say for what."""


def sealed_plan(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a plan file, with its format, version and checksum."""
    whole = {"format": _FORMAT, "version": _VERSION, **content}
    return whole | {"checksum": _checksum(whole)}


def _checksum(content: Mapping[str, Any]) -> str:
    """Checksum of what a plan was made for: model, devices, batch and options of the job."""
    given = {name: own for name, own in content.items() if name not in (*_PLANNED, "checksum")}
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_plan_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object of a plan file.

    Args:
        path: of the file, as `merak plan --output` has written it.

    Raises:
        PlanError: it cannot be read, is no plan, or of a version that is not known.
    """
    try:
        content = read_json(path)
    except UnreadableFile as error:
        raise PlanError(
            f"the plan {path} {error}; name a file that `merak plan --output` has written."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlanError(f"{path} is no plan; give a file that `merak plan --output` has written.")
    if content.get("version") != _VERSION:
        raise PlanError(
            f"the plan {path} has version {content.get('version')!r}, and this Merak reads version "
            f"{_VERSION}; plan again with `merak plan`."
        )
    # Files before there was one have none.
    if content.get("checksum", expected := _checksum(content)) != expected:
        raise PlanError(
            f"the plan {path} is not for what it was made for: its checksum is "
            f"{content['checksum']!r}, and that of its model, devices, batch and options is "
            f"{expected!r}; plan again with `merak plan`."
        )
    return content


def plan_degrees(path: str | os.PathLike[str]) -> GivenDegrees:
    """Degrees of a plan file, all of them.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """
    candidate = read_plan_content(path).get("candidate")
    known = {"cp": 1, "ep": 1} | (candidate if isinstance(candidate, dict) else {})
    found = [known.get(axis) for axis in GivenDegrees._fields]
    if not all(isinstance(degree, int) and degree > 0 for degree in found):
        raise PlanError(f"the plan {path} has no degrees; plan again with `merak plan`.")
    return GivenDegrees(*found)

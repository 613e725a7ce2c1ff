"""Degrees of a plan file, which ranks need before anything else of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from merak.core.elastic import Degrees
from merak.core.errors import PlanError

PLAN_FORMAT = "merak-plan"
"""What a plan file says that it is."""

PLAN_VERSION = 1


def read_plan_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object of a plan file.

    Args:
        path: of the file, as `merak plan --output` has written it.

    Raises:
        PlanError: it cannot be read, is no plan, or of a version that is not known.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise PlanError(f"the plan {path} is not JSON: {error}.") from error
    if not isinstance(content, dict) or content.get("format") != PLAN_FORMAT:
        raise PlanError(f"{path} is no plan; give a file that `merak plan --output` has written.")
    if content.get("version") != PLAN_VERSION:
        raise PlanError(
            f"the plan {path} has version {content.get('version')!r}, and this Merak reads version "
            f"{PLAN_VERSION}; plan again with `merak plan`."
        )
    return content


def plan_degrees(path: str | os.PathLike[str]) -> Degrees:
    """Degrees of a plan file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """
    content = read_plan_content(path)
    candidate = content.get("candidate")
    found: list[Any] = [candidate.get(axis) if isinstance(candidate, dict) else 0 for axis in _AXES]
    if not all(isinstance(degree, int) and degree > 0 for degree in found):
        raise PlanError(f"the plan {path} has no degrees; plan again with `merak plan`.")
    return Degrees(*found)


_AXES = ("dp", "tp", "pp")

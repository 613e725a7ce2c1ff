"""Files of profiles: one JSON object with a version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from merak.core.errors import PlanError
from merak.core.files.json_file import UnreadableFile, parse_json, read_json, read_text
from merak.plan.cost.calibration import Curve, PassSeconds, curve_of
from merak.plan.cost.device import from_json, to_json
from merak.plan.profile.profile import (
    HOST,
    NETWORK,
    CollectiveTimes,
    LinkTimes,
    Machine,
    Profile,
    SegmentRow,
)

VERSION = 1
"""Version of the files that this Merak writes and reads."""

KEY = "merak_profile"
"""Field of a profile's file that holds the version, by which the file is known."""

Part = TypeVar("Part")


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile.

    Args:
        path: of the file.
        profile: what was measured.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        path.write_text(profile_text(profile), encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written ({error.strerror}); name another file."
        ) from error


def profile_text(profile: Profile) -> str:
    """A profile as one JSON object."""
    content = {
        KEY: VERSION,
        "machine": asdict(profile.machine),
        "hosts": dict(profile.hosts),
        "speeds": json.loads(to_json(profile.speeds)),
        "products": {name: _points(curve) for name, curve in profile.products},
        "copies": _points(profile.copies),
        "functions": _points(profile.functions),
        "updates": _points(profile.updates),
        "links": [asdict(own) | {"seconds": _points(own.seconds)} for own in profile.links],
        "collectives": [
            asdict(own) | {"seconds": _points(own.seconds)} for own in profile.collectives
        ],
        "interference": dict(profile.interference),
        "segments": [asdict(row) for row in profile.segments],
    }
    return json.dumps(content, indent=1)


def is_profile(path: Path) -> bool:
    """Whether a file is a profile, of whatever version; a file that cannot be read is none."""
    try:
        content = read_json(path)
    except UnreadableFile:
        return False
    return isinstance(content, dict) and KEY in content


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Args:
        path: of a file that `merak profile` has written.

    Raises:
        PlanError: there is no such file, it is no profile or of another version, or a figure is
            none.
    """
    try:
        text = read_text(path)
    except UnreadableFile as error:
        raise PlanError(f"{path} {error}; name a profile.") from error
    return profile_from(text, str(path))


def profile_from(text: str, where: str) -> Profile:
    """A profile from `profile_text`.

    Args:
        text: one JSON object.
        where: what to call it in messages, such as the file's path.

    Raises:
        PlanError: it is no profile or of another version, or a figure is none.
    """
    try:
        content = parse_json(text)
    except UnreadableFile as error:
        raise PlanError(f"{where} {error}; name a profile.") from error
    if not isinstance(content, dict) or KEY not in content:
        raise PlanError(f"{where} is no profile; name a file that `merak profile` has written.")
    if content[KEY] != VERSION:
        raise PlanError(
            f"{where} is a profile of version {content[KEY]}, but this Merak reads {VERSION}; run "
            "`merak profile` again."
        )
    try:
        return _profile(content, where)
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"{where} is a damaged profile ({type(error).__name__}: {error}); run "
            "`merak profile` again."
        ) from error


def _profile(content: Mapping[str, Any], where: str) -> Profile:
    return Profile(
        machine=Machine(**{name: str(value) for name, value in content["machine"].items()}),
        hosts=tuple((str(name), _count(ranks)) for name, ranks in content["hosts"].items()),
        speeds=from_json(json.dumps(content["speeds"]), where),
        products=tuple((name, _curve(own)) for name, own in content["products"].items()),
        copies=_curve(content["copies"]),
        functions=_curve(content["functions"]),
        updates=_curve(content["updates"]),
        links=_rows(content["links"], _link),
        collectives=_rows(content["collectives"], _collective),
        interference=tuple(
            (kind, _number(part, least=0.0)) for kind, part in content["interference"].items()
        ),
        segments=_rows(content["segments"], _segment),
    )


def _rows(rows: Any, read: Callable[[Mapping[str, Any]], Part]) -> tuple[Part, ...]:
    return tuple(map(read, rows))


def _link(row: Mapping[str, Any]) -> LinkTimes:
    if row["kind"] not in (HOST, NETWORK):
        raise ValueError(f"kind={row['kind']!r} of a link, which is {HOST!r} or {NETWORK!r}")
    return LinkTimes(row["kind"], _count(row["senders"]), _curve(row["seconds"]))


def _collective(row: Mapping[str, Any]) -> CollectiveTimes:
    return CollectiveTimes(
        str(row["kind"]), _count(row["ranks"]), _count(row["hosts"]), _curve(row["seconds"])
    )


def _segment(row: Mapping[str, Any]) -> SegmentRow:
    seconds = {name: _number(row["seconds"][name], 0.0) for name in PassSeconds.__slots__}
    texts = {name: str(row[name]) for name in ("model", "name", "digest", "kind")}
    return SegmentRow(
        **texts,
        size=_number(row["size"], 0.0),
        microbatch=_count(row["microbatch"]),
        tp=_count(row["tp"]),
        seconds=PassSeconds(**seconds),
    )


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve.points]


def _curve(points: Any) -> Curve:
    found = [(_number(size), _number(value)) for size, value in points]
    if not found:
        raise ValueError("a curve without points")
    return curve_of(found)


def _number(value: Any, least: float | None = None) -> float:
    """A finite number: above 0, or at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < math.inf:
        raise ValueError(f"{value!r} is no number")
    if not (value > 0 if least is None else value >= least):
        raise ValueError(f"{value!r} is too small")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value

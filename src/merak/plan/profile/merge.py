"""Merging of profiles: figures of several runs on equal devices in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merak.core.errors import PlanError
from merak.plan.cost.calibration import Curve, curve_of
from merak.plan.profile.profile import CollectiveTimes, LinkTimes, Profile


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles of equal devices, measured with the same torch and backend.

    Figures of one kind and size are the last profile's; all others are kept.

    Args:
        profiles: at least one, the most trusted one last.

    Raises:
        PlanError: two of them are of different devices, torch versions or backends.
    """
    merged = profiles[0]
    for other in profiles[1:]:
        merged = _merged(merged, other)
    return merged


def _merged(first: Profile, last: Profile) -> Profile:
    _check(first, last)
    products = dict(first.products)
    for name, curve in last.products:
        products[name] = _both(products.get(name), curve)
    hosts = dict(first.hosts)
    for host, ranks in last.hosts:
        hosts[host] = max(ranks, hosts.get(host, 0))
    links: dict[tuple[str, int], LinkTimes] = {}
    for link in (*first.links, *last.links):
        known = links.get((link.kind, link.senders))
        seconds = _both(known.seconds if known else None, link.seconds)
        links[link.kind, link.senders] = replace(link, seconds=seconds)
    collectives: dict[tuple[str, int, int], CollectiveTimes] = {}
    for own in (*first.collectives, *last.collectives):
        key = (own.kind, own.ranks, own.hosts)
        before = collectives.get(key)
        seconds = _both(before.seconds if before else None, own.seconds)
        collectives[key] = replace(own, seconds=seconds)
    segments = {row.digest: row for row in (*first.segments, *last.segments)}
    machine = replace(last.machine, backend=last.machine.backend or first.machine.backend)
    return Profile(
        machine=machine,
        hosts=tuple(hosts.items()),
        speeds=last.speeds,
        products=tuple(products.items()),
        copies=_both(first.copies, last.copies),
        functions=_both(first.functions, last.functions),
        updates=_both(first.updates, last.updates),
        links=tuple(links.values()),
        collectives=tuple(collectives.values()),
        interference=tuple((dict(first.interference) | dict(last.interference)).items()),
        segments=tuple(segments.values()),
    )


def _both(first: Curve | None, last: Curve) -> Curve:
    return last if first is None else curve_of([*first.points, *last.points])


def _check(first: Profile, last: Profile) -> None:
    for name in ("device", "torch", "backend"):
        one, other = getattr(first.machine, name), getattr(last.machine, name)
        if one != other and (name != "backend" or (one and other)):
            raise PlanError(
                f"The profiles have {name}={one!r} and {name}={other!r}, whose figures do not mix; "
                "merge profiles of equal devices, torch versions and backends."
            )

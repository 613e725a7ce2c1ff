"""Checks of pinned degrees against the devices and the batch, before a model is built."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merak.core.elastic import Degrees, check_expert_degree, divisors
from merak.core.errors import PlanError
from merak.core.units import counted
from merak.plan.search.pinned import Pinned

_MOST_NAMED = 6
"""Numbers that a sentence names as those that would fit."""


def check_degrees(num_devices: int, global_batch: int, pinned: Pinned) -> None:
    """Refuse pinned degrees that no plan can have.

    Args:
        num_devices: of the cluster.
        global_batch: samples of one step of the whole job.
        pinned: choices that are made.

    Raises:
        PlanError: the degrees do not divide the devices, or the batch; what would fit is named.
    """
    # What is not pinned of cp may be 1 everywhere.
    degrees = {"dp": pinned.dp, "tp": pinned.tp, "pp": pinned.pp, "cp": pinned.cp or 1}
    for axis, degree in (*degrees.items(), ("microbatch", pinned.microbatch)):
        if degree is not None and degree < 1:
            raise PlanError(f"{axis}={degree} is too small; use 1 or more.")
    named = " × ".join(
        f"{axis}={degree}"
        for axis, degree in degrees.items()
        if degree and (axis != "cp" or degree > 1)
    )
    product = math.prod(degree for degree in degrees.values() if degree)
    if product > num_devices:
        raise PlanError(
            f"{named} takes {counted(product, 'device')}, but the cluster has {num_devices}; use "
            "smaller "
            "degrees or more devices."
        )
    if None in degrees.values() and num_devices % product:
        what = "a product of " if "×" in named else ""
        fitting = _nearest(divisors(num_devices), product)
        raise PlanError(
            f"{named} does not divide the cluster's {num_devices} devices; use {what}{fitting}."
        )
    if pinned.ep is not None and (pinned.ep < 1 or num_devices % pinned.ep):
        raise PlanError(
            f"ep={pinned.ep} does not divide the cluster's {num_devices} devices; use "
            f"{_nearest(divisors(num_devices), max(pinned.ep, 1))}."
        )
    if pinned.ep is not None and pinned.tp is not None:
        check_expert_degree(pinned.ep, Degrees(pinned.dp or num_devices, pinned.tp, 1))
    _check_batch(num_devices, global_batch, pinned)


def _check_batch(num_devices: int, global_batch: int, pinned: Pinned) -> None:
    dp, why = pinned.dp, ""
    if dp is None and pinned.tp and pinned.pp:
        cp = pinned.cp or 1
        dp = num_devices // (pinned.tp * pinned.pp * cp)
        context = f" × cp={cp}" if cp > 1 else ""
        given = f"tp={pinned.tp} × pp={pinned.pp}{context}"
        why = f", which {given} leaves of {counted(num_devices, 'device')},"
    each = (dp or 1) * (pinned.microbatch or 1)
    if not global_batch % each:
        return
    factors = [f"dp={dp}{why}"] if dp else []
    factors += [f"microbatch={pinned.microbatch}"] if pinned.microbatch else []
    below = global_batch // each * each
    batches = f"{below} or {below + each}" if below else str(each)
    what = "a product" if len(factors) > 1 else f"a {factors[0].partition('=')[0]}"
    raise PlanError(
        f"{' × '.join(factors)} does not divide the global batch of "
        f"{counted(global_batch, 'sample')}; use a "
        f"global batch of {batches}, or {what} of {_nearest(divisors(global_batch), each)}."
    )


def _nearest(numbers: Sequence[int], wanted: int) -> str:
    """The numbers nearest to the one that was wanted, in words."""
    nearest = sorted(numbers, key=lambda own: abs(math.log(own / wanted)))[:_MOST_NAMED]
    *most, last = map(str, sorted(nearest))
    return f"{', '.join(most)} or {last}" if most else last

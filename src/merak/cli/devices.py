"""Devices that a command plans for, and that need not be here: `--device` and `--cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merak.cli.options import option, words
from merak.core.errors import CommandError
from merak.core.units import counted
from merak.plan.cost.data_sheets import SHEETS

if TYPE_CHECKING:
    from merak.plan.cluster.cluster import Cluster


def sheet_device(what: str) -> Any:
    """Field of a request for a GPU by its data sheet.

    Args:
        what: is then shown.
    """
    names = ", ".join(SHEETS)
    return option(
        None, "--device", "GPU", f"{what} A GPU that need not be here: {names}.", **words(SHEETS)
    )


def cluster() -> Any:
    """Field of a request for a cluster, in place of a device."""
    return option(
        None,
        "--cluster",
        "DEVICE:PER_NODExNODES|FILE",
        "Devices that need not be here with their links, such as h100:8x4, or a YAML file of them.",
        **words(SHEETS),
    )


def planned_cluster(device: str | None, cluster: str | None, num_devices: int) -> Cluster | None:
    """The devices that a command plans for; None where none are named.

    Args:
        device: as `--device`; so many of it are then on one node.
        cluster: as `--cluster`.
        num_devices: that the job takes.

    Raises:
        CommandError: both are named.
        PlanError: there is no such device or file, or too few devices.
    """
    from merak.core.errors import PlanError
    from merak.plan.cluster.parse import parse_cluster

    if device is not None and cluster is not None:
        raise CommandError(
            f"--device {device} and --cluster {cluster} both name devices; give one of them."
        )
    if device is not None:
        return parse_cluster(f"{device}:{num_devices}")
    if cluster is None:
        return None
    found = parse_cluster(cluster)
    if found.num_devices < num_devices:
        raise PlanError(
            f"{num_devices} ranks are more than the {counted(found.num_devices, 'device')} of "
            f"{cluster}; use "
            "smaller degrees or more devices."
        )
    return found

"""A profile: what `merak profile` has measured, and on which hardware and torch."""

from __future__ import annotations

from dataclasses import dataclass

from merak.plan.cost.calibration import Curve, PassSeconds
from merak.plan.cost.device import DeviceProfile

HOST = "host"
"""Kind of a link between the ranks of one host."""

NETWORK = "network"
"""Kind of a link between hosts."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and software that a profile was measured on.

    Args:
        device: name of the devices.
        device_type: "cpu" or "cuda".
        torch: its version.
        merak: its version.
        backend: that carried tensors between ranks; empty where there was one rank.
    """

    device: str
    device_type: str
    torch: str
    merak: str
    backend: str = ""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Measured messages between two ranks.

    Args:
        kind: `HOST` or `NETWORK`.
        senders: ranks of a host that sent at the same time, each to a partner of its own.
        seconds: of a message, by its bytes.
    """

    kind: str
    senders: int
    seconds: Curve


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Measured collectives of one kind and group.

    Args:
        kind: as of `collective_seconds`.
        ranks: of the group.
        hosts: that they are on.
        seconds: by bytes of the whole tensor.
    """

    kind: str
    ranks: int
    hosts: int
    seconds: Curve


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Measured segment.

    Args:
        model: class of the model that it is from.
        name: of the segment.
        digest: `segment_digest` of its graph.
        kind: `segment_kind` of its graph.
        size: bytes of all values of its graph.
        microbatch: samples.
        tp: tensor parallel degree.
        seconds: of its passes.
    """

    model: str
    name: str
    digest: str
    kind: str
    size: float
    microbatch: int
    tp: int
    seconds: PassSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured speeds of devices and links.

    Args:
        machine: what it was measured on.
        hosts: ranks of every host, by its name.
        speeds: of one device, as the planner's estimates take them.
        products: seconds of a square matrix product by its FLOPs, by element type.
        copies: seconds of a copy by bytes read and written.
        functions: seconds of gelu by elements.
        updates: seconds of an AdamW step by bytes of float32 parameters.
        links: messages.
        collectives: of groups.
        interference: by kind of link, the part of a hidden collective's time that the computation
            beside it takes longer.
        segments: of models.
    """

    machine: Machine
    hosts: tuple[tuple[str, int], ...]
    speeds: DeviceProfile
    products: tuple[tuple[str, Curve], ...]
    copies: Curve
    functions: Curve
    updates: Curve
    links: tuple[LinkTimes, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    interference: tuple[tuple[str, float], ...] = ()
    segments: tuple[SegmentRow, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks that were measured together."""
        return sum(ranks for _, ranks in self.hosts)


def differences(profile: Profile, device: str | None, torch_version: str) -> list[str]:
    """Sentences that warn of a profile of other hardware or another torch.

    Args:
        profile: that is to be used.
        device: name of the devices that it is used for; None where they are not here.
        torch_version: that it is used with.
    """
    own, found = profile.machine, []
    if device is not None and own.device != device:
        found.append(
            f"The profile is of {own.device!r}, but the device here is {device!r}; run "
            "`merak profile` here for its own figures."
        )
    if own.torch != torch_version:
        found.append(
            f"The profile was measured with torch {own.torch}, but this is torch {torch_version}; "
            "run `merak profile` again."
        )
    return found

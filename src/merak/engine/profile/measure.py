"""A profile measured by the ranks of a job."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from merak.core.announce import announced
from merak.core.mesh import Mesh
from merak.core.packages import installed_version
from merak.core.random import own_random_state
from merak.engine.profile.device_speed import measure_device
from merak.engine.profile.links import SIZES, communicator_bytes, measure_links
from merak.engine.profile.segments import Batch, measure_segments
from merak.engine.profile.stopwatch import Stopwatch
from merak.plan.cost.benchmark import device_name
from merak.plan.price.workload import Workload
from merak.plan.profile.profile import Machine, Profile, SegmentRow


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A model whose segments are measured.

    Args:
        workload: the model.
        batch: columns of a microbatch.
        microbatches: numbers of samples to measure.
        tp: tensor parallel degrees to measure.
    """

    workload: Workload
    batch: Batch
    microbatches: Sequence[int]
    tp: Sequence[int]


def measure_profile(
    mesh: Mesh,
    model: ProfiledModel | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    round_s: float = 0.02,
    compute: Callable[[], object] | None = None,
) -> Profile:
    """Measure devices, links and segments; all ranks call it together.

    All ranks compute at the same time, as they do in a job. The slowest rank's figures count for
    links, rank 0's for what a rank does alone.

    Args:
        mesh: of the ranks.
        model: whose segments are measured; None for none.
        sizes: bytes of messages and collectives.
        round_s: seconds of a round of calls.
        compute: some computation, beside which collectives are measured; None for a product.

    Raises:
        PlanError: a device that cannot be measured.
        TraceError: a model that cannot be traced.
    """
    with own_random_state(mesh.device):
        own = _product(mesh.device) if compute is None else compute
        return _measure(mesh, model, sizes, round_s, own)


def _measure(
    mesh: Mesh,
    model: ProfiledModel | None,
    sizes: Sequence[int],
    round_s: float,
    compute: Callable[[], object],
) -> Profile:
    watch = Stopwatch(mesh.device, round_s)
    with announced("measuring the device"):
        device = measure_device(watch)
    with announced("measuring the links"):
        links = measure_links(mesh, watch, compute, sizes)
    segments: list[SegmentRow] = []
    if model is not None:
        with announced("measuring the segments"):
            segments = list(_segments(watch, model))
    return Profile(
        machine=_machine(mesh),
        hosts=_hosts(mesh),
        speeds=replace(device.speeds, communicator_bytes=communicator_bytes(mesh)),
        products=device.products,
        copies=device.copies,
        functions=device.functions,
        updates=device.updates,
        links=links.links,
        collectives=links.collectives,
        interference=links.interference,
        segments=tuple(segments),
    )


def _segments(watch: Stopwatch, model: ProfiledModel) -> Iterator[SegmentRow]:
    for microbatch in model.microbatches:
        for tp in model.tp:
            yield from measure_segments(model.workload, model.batch, watch, microbatch, tp)


def _product(device: torch.device) -> Callable[[], object]:
    """A matrix product, beside which collectives are measured."""
    side = 2048 if device.type == "cuda" else 192
    matrix = torch.randn(side, side, device=device)
    return lambda: matrix.mm(matrix)


def _hosts(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Ranks of every host."""
    return tuple(Counter(mesh.hosts or (socket.gethostname(),) * mesh.world_size).items())


def _machine(mesh: Mesh) -> Machine:
    return Machine(
        device=device_name(mesh.device),
        device_type=mesh.device.type,
        torch=torch.__version__,
        merak=installed_version("merak-train"),
        backend=_backend(mesh.device) if mesh.world_size > 1 else "",
    )


def _backend(device: torch.device) -> str:
    config = dist.get_backend_config()
    return dict(part.split(":") for part in config.split(",")).get(device.type, config)

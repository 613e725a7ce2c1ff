"""Outcome of planning, which the report and the page show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from merak.plan.cluster.cluster import Cluster
    from merak.plan.price.workload import Workload
    from merak.plan.search.pinned import Pinned
    from merak.plan.search.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Planned:
    """Outcome of planning.

    Args:
        workload: the job.
        cluster: the devices, in the order of the plans' ranks.
        cluster_name: the devices as they were named, or in that order if it is another.
        pinned: choices of the request.
        ranking: the plans.
    """

    workload: Workload
    cluster: Cluster
    cluster_name: str
    pinned: Pinned
    ranking: Ranking

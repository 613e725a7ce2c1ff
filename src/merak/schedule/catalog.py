"""Catalog of the schedules that are one formula each, by name; `auto` compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from merak.schedule.builders.chimera import chimera
from merak.schedule.builders.dualpipe_v import dualpipe_v
from merak.schedule.builders.early_recompute import early_recompute
from merak.schedule.builders.gems import gems
from merak.schedule.builders.gpipe import gpipe
from merak.schedule.builders.interleaved_1f1b import interleaved_1f1b
from merak.schedule.builders.interleaved_zero_bubble import interleaved_zero_bubble
from merak.schedule.builders.last_no_recompute import last_no_recompute
from merak.schedule.builders.one_f_one_b import one_f_one_b
from merak.schedule.builders.pipedream import pipedream
from merak.schedule.builders.pipedream_2bw import pipedream_2bw
from merak.schedule.builders.shifted_critical_path import shifted_critical_path
from merak.schedule.builders.zero_bubble_h1 import zero_bubble_h1
from merak.schedule.builders.zero_bubble_v import zero_bubble_v
from merak.schedule.ir import Schedule

FORMULAS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "early_recompute": early_recompute,
        "last_no_recompute": last_no_recompute,
        "shifted_critical_path": shifted_critical_path,
        "interleaved_1f1b": interleaved_1f1b,
        "chimera": chimera,
        "gems": gems,
        "zero_bubble_h1": zero_bubble_h1,
        "interleaved_zero_bubble": interleaved_zero_bubble,
        "zero_bubble_v": zero_bubble_v,
        "dualpipe_v": dualpipe_v,
        "pipedream": pipedream,
        "pipedream_2bw": pipedream_2bw,
    }
)
"""Builders: (num_ranks, num_microbatches, **options) to a schedule."""

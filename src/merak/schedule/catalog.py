"""Catalog of the schedules that are one formula each, by name; `auto` compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from merak.schedule.builders.chimera import chimera
from merak.schedule.builders.dualpipe_v import check_dualpipe_v, dualpipe_v
from merak.schedule.builders.early_recompute import early_recompute
from merak.schedule.builders.gems import gems
from merak.schedule.builders.gpipe import gpipe
from merak.schedule.builders.interleaved_1f1b import check_interleaved, interleaved_1f1b
from merak.schedule.builders.last_no_recompute import last_no_recompute
from merak.schedule.builders.looped_bfs import looped_bfs
from merak.schedule.builders.one_f_one_b import one_f_one_b
from merak.schedule.builders.pipedream import pipedream
from merak.schedule.builders.pipedream_2bw import pipedream_2bw
from merak.schedule.builders.shifted_critical_path import shifted_critical_path
from merak.schedule.builders.zero_bubble.h1 import zero_bubble_h1
from merak.schedule.builders.zero_bubble.h2 import zb_h2
from merak.schedule.builders.zero_bubble.interleaved import interleaved_zero_bubble
from merak.schedule.builders.zero_bubble.v import zero_bubble_v
from merak.schedule.builders.zero_bubble.v_half import v_half
from merak.schedule.builders.zero_bubble.v_min import v_min
from merak.schedule.ir import USUAL
from merak.schedule.traits import Builder, Traits


def even_traits(
    part: float = 1, stages: int = 1, more: float = 0, **own: bool
) -> Callable[..., Traits]:
    """Traits by formula: part of 1F1B's bubble, stages per rank, more microbatches in flight."""

    def traits(ranks: int, count: int, **chosen: object) -> Traits:
        idle, held = part * (ranks - 1) / stages, min(ranks + more, count)
        return Traits(num_stages=stages * ranks, bubble=idle, in_flight=held, **own)

    return traits


def _interleaved(name: str, part: float = 1, **own: bool) -> Callable[..., Traits]:
    def traits(ranks: int, count: int, *, chunks: int = 2, **chosen: object) -> Traits:
        check_interleaved(name, ranks, count, chunks)
        return even_traits(part, chunks, (ranks - 1) / chunks, **own)(ranks, count)

    return traits


def _dualpipe_v(ranks: int, count: int) -> Traits:
    check_dualpipe_v(ranks, count)
    return even_traits(1 / 3, 2, 1 / 2, splits_backwards=True, joins_ends=True)(ranks, count)


def _v_pattern(ranks: int, idle: int, held: int) -> Traits:
    """Traits of V-Half and V-Min; `idle` is in sixths of a rank's work on a microbatch."""
    return Traits(
        num_stages=2 * ranks,
        bubble=max(idle, 0) / 6,
        in_flight=held,
        splits_backwards=True,
        joins_ends=True,
    )


def _v_half(ranks: int, count: int) -> Traits:
    idle = max(3 * ranks - 4 + (ranks == 2), 4 * ranks - 3 - 2 * count)
    return _v_pattern(ranks, idle, min((ranks + 2) // 2, count))


def _v_min(ranks: int, count: int) -> Traits:
    idle = 4 * ranks - 5 + 2 * (ranks % 3 == 0 and count > 1)
    return _v_pattern(ranks, idle, min((ranks + 4) // 3, count))


FORMULAS: Mapping[str, Builder] = MappingProxyType(
    {
        "gpipe": Builder(gpipe, tried=({},)),
        USUAL: Builder(one_f_one_b, ({},), formula=even_traits(is_fifo=True)),
        "early_recompute": Builder(early_recompute, tried=({},)),
        "last_no_recompute": Builder(last_no_recompute, tried=({},)),
        "shifted_critical_path": Builder(
            shifted_critical_path, tried=({}, {"early_everywhere": True})
        ),
        "interleaved_1f1b": Builder(
            interleaved_1f1b,
            ({"chunks": 2}, {"chunks": 4}),
            formula=_interleaved("interleaved_1f1b"),
        ),
        "looped_bfs": Builder(looped_bfs, tried=({"chunks": 2}, {"chunks": 4})),
        "chimera": Builder(
            chimera,
            tried=(
                {},
                {"eager_middle": True},
                {"method": "forward_doubling"},
                {"method": "backward_halving"},
                {"pairs": 2},
            ),
        ),
        "gems": Builder(gems, tried=({},)),
        "zero_bubble_h1": Builder(
            zero_bubble_h1, ({},), formula=even_traits(1 / 3, splits_backwards=True)
        ),
        "zb_h2": Builder(zb_h2, tried=({},)),
        "interleaved_zero_bubble": Builder(
            interleaved_zero_bubble,
            ({"chunks": 2},),
            formula=_interleaved("interleaved_zero_bubble", 1 / 3, splits_backwards=True),
        ),
        "zero_bubble_v": Builder(
            zero_bubble_v,
            ({},),
            formula=even_traits(1 / 3, 2, splits_backwards=True, joins_ends=True),
        ),
        "v_half": Builder(v_half, ({},), formula=_v_half),
        "v_min": Builder(v_min, ({},), formula=_v_min),
        "dualpipe_v": Builder(dualpipe_v, ({},), formula=_dualpipe_v),
        "pipedream": Builder(pipedream),
        "pipedream_2bw": Builder(pipedream_2bw),
    }
)
"""Builders of Merak's own; what a search tries in every layout has a formula for its traits."""

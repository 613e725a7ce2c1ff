"""Shifted critical path against 1F1B with full recomputation: simulated, beside the paper's figure.

The gain is 1 - time ÷ time of 1F1B, with M = 2P microbatches and F = R = 1, B = 2 on every stage
but the last, whose head makes it longer by the factor given. The paper (arXiv 2206.04959,
figure 9a) measured 18.6 to 22.0 %.
"""

from __future__ import annotations

from typing import Any

from tools import report

from merak.schedule import build, simulate, stage_costs

PAPER_PERCENT = (18.6, 22.0)
SIZES = (4, 8, 16, 32, 64)
HEADS = (1.0, 1.1, 1.2, 1.35, 1.5)


def gain_percent(num_stages: int, head: float, early_everywhere: bool) -> float:
    forward = (*(1.0,) * (num_stages - 1), head)
    costs = stage_costs(forward, tuple(2 * seconds for seconds in forward))
    num_microbatches = 2 * num_stages
    plain = build("1f1b", num_stages, num_microbatches)
    shifted = build(
        "shifted_critical_path", num_stages, num_microbatches, early_everywhere=early_everywhere
    )
    return 100 * (1 - simulate(shifted, costs).makespan / simulate(plain, costs).makespan)


def row(num_stages: int, early_everywhere: bool) -> dict[str, Any]:
    heads = {
        f"head × {head}": round(gain_percent(num_stages, head, early_everywhere), 1)
        for head in HEADS
    }
    low, high = PAPER_PERCENT
    return {"stages": num_stages, **heads, "paper, figure 9a": f"{low} to {high}"}


def main() -> None:
    args = report.parser(__doc__).parse_args()
    tables = {
        "Gain in %, recomputing early everywhere": [row(size, True) for size in SIZES],
        "Gain in %, recomputing early where equal stages wait": [row(p, False) for p in SIZES],
    }
    report.show(tables, args.json)


if __name__ == "__main__":
    main()

"""Recorded text of every schedule, which a change must not move unnoticed.

Record anew with `python -m tests.unit.schedule.test_golden`, and read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.schedule.registry import build, names
from merak.schedule.serialize import from_text, to_text
from merak.schedule.validate.schedule import validate

FOLDER = Path(__file__).parents[2] / "golden" / "schedule"

CASES = {
    **{name: (name, 4, 8, {}) for name in names()},
    "shifted_critical_path_early_everywhere": (
        "shifted_critical_path",
        4,
        8,
        {"early_everywhere": True},
    ),
    "chimera_forward_doubling": ("chimera", 4, 8, {"method": "forward_doubling"}),
    "chimera_two_pairs": ("chimera", 8, 8, {"pairs": 2}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_schedules_are_as_recorded(case: str) -> None:
    name, num_ranks, num_microbatches, options = CASES[case]
    schedule = build(name, num_ranks, num_microbatches, **options)
    recorded = (FOLDER / f"{case}.txt").read_text(encoding="utf-8")
    assert to_text(schedule) == recorded
    assert not validate(from_text(recorded))


if __name__ == "__main__":
    for case, (name, num_ranks, num_microbatches, options) in CASES.items():
        text = to_text(build(name, num_ranks, num_microbatches, **options))
        (FOLDER / f"{case}.txt").write_text(text, encoding="utf-8")

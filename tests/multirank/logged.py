"""What a training has logged and made, compared with that of the package it is taken from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Outcome:
    """What a training has logged, and the model's parameters behind it, on rank 0."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def logs_of(trainer: Any) -> list[dict[str, float]]:
    """What is logged of each step and evaluation, but for times."""
    times = ("_runtime", "_per_second", "total_flos")
    return [
        {name: value for name, value in log.items() if not name.endswith(times)}
        for log in trainer.state.log_history
    ]


def expect_equal(found: Outcome, expected: Outcome) -> None:
    """Compare what two trainings have logged and made."""
    assert len(found.logs) == len(expected.logs)
    for one, other in zip(found.logs, expected.logs, strict=True):
        if other.get("rewards/margins") == 0.0:  # of equal models, where rounding decides
            for log in (one, other):
                log.pop("rewards/accuracies", None)
        assert one.keys() == other.keys()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)

"""Scenarios of `drop_in_scenarios`, run by transformers in one process and by Merak on ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from merak.core.errors import MerakError
from tests.multirank.drop_in_scenarios import SCENARIOS, Seen
from tests.multirank.training import Layout, Setup, alone, make_merak, make_reference

SHORT = {
    "max_steps": 3, "logging_steps": 1, "per_device_eval_batch_size": 4, "learning_rate": 0.1,
    "optim": "sgd",  # Adam would make as much of rounding as of a gradient
}  # fmt: skip
REFUSED = "refused"


def _setup(family: str, arguments: Mapping[str, Any]) -> Setup:
    return Setup(family, num_microbatches=2, num_samples=32, arguments=SHORT | dict(arguments))


def of_transformers(name: str, folder: str) -> Seen:
    """What a scenario sees under transformers, in this process alone."""

    def make(
        mixin: type | None = None, family: str = "gpt2", arguments: Any = None, **kwargs: Any
    ) -> Any:
        base = Trainer
        own = base if mixin is None else type(mixin.__name__, (mixin, base), {})
        return make_reference(_setup(family, arguments or {}), trainer_class=own, **kwargs)

    with alone():
        return SCENARIOS[name].run(make, Path(folder))


def of_merak(layout: Layout, name: str, folder: str, cache: str) -> Seen:
    """What a scenario sees on this rank; under `REFUSED` the error, where Merak refuses it."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def make(
        mixin: type | None = None, family: str = "gpt2", arguments: Any = None, **kwargs: Any
    ) -> Any:
        base = merak.MerakTrainer
        own = base if mixin is None else type(mixin.__name__, (mixin, base), {})
        setup = _setup(family, arguments or {})
        return make_merak(setup, dp, cache, trainer_class=own, **kwargs)

    try:
        return SCENARIOS[name].run(make, Path(folder))
    except MerakError as error:
        return {REFUSED: str(error)}


def differences(ranks: Sequence[Seen], expected: Seen | None, refused: str | None) -> list[str]:
    """How what ranks have seen differs from what was expected; nothing where it does not."""
    if refused is not None:
        pattern = re.escape(refused)
        return [
            f"rank {rank} is not refused: {list(seen)}, {seen.get(REFUSED)}"
            for rank, seen in enumerate(ranks)
            if not re.search(pattern, seen.get(REFUSED, ""))
        ]
    assert expected is not None
    found = []
    for rank, seen in enumerate(ranks):
        if REFUSED in seen:
            found.append(f"rank {rank}: {seen[REFUSED]}")
            continue
        own = {n: v for n, v in expected.items() if rank == 0 or n != "final"}
        for name, value in own.items():
            try:
                _compare(seen[name], value)
            except AssertionError as error:
                found.append(f"rank {rank}, {name}: {error}")
    return found


def _compare(found: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for name, value in expected.items():
            _compare(found[name], value)
    elif isinstance(expected, float | torch.Tensor) or (
        isinstance(expected, list) and expected and isinstance(expected[0], float)
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    else:
        assert found == expected, (found, expected)

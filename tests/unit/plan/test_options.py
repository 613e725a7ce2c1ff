"""Options that `MerakArguments`, `parallelize` and the command line share."""

from __future__ import annotations

import inspect
import logging
import typing
from dataclasses import fields
from typing import Any

import pytest

from merak import parallel
from merak.arguments.fields import TrainingFields
from merak.cli.memory import memory
from merak.cli.plan.plan import plan
from merak.cli.rehearse import rehearse
from merak.core.errors import ArgumentsError
from merak.core.rank0 import warn_once
from merak.graph.tensor_parallel.features import Column
from merak.plan.engine_options import EngineOptions
from merak.plan.options import LAYOUT, PARALLEL_OPTIONS, PRICED, ParallelOptions


def test_training_arguments_have_every_option_with_its_help() -> None:
    taken = {field.name: field for field in fields(TrainingFields)}
    for option in fields(ParallelOptions):
        assert taken[option.name].metadata["help"] == option.metadata["help"]
        if option.name != "bucket_bytes":  # which ddp_bucket_cap_mb may set
            assert taken[option.name].default == option.default


def test_training_arguments_have_types_that_options_take() -> None:
    hints, wide = typing.get_type_hints(TrainingFields), typing.get_type_hints(ParallelOptions)
    for name in ("schedule", "zero", "master_weights", "hang_limit_s"):
        assert hints[name] == wide[name]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"zero": 4}, "zero=4 is not a choice; use 0, 1, 2 or 3."),
        ({"gradient_sums": "half"}, "gradient_sums='half' is not a choice; use 'float32' or 'own'"),
        ({"memory_budget": 0}, "memory_budget=0 is not a size; use a number of bytes above 0."),
        ({"host_bytes_per_s": float("inf")}, "host_bytes_per_s=inf is no rate"),
        ({"local_steps": -1}, "local_steps=-1 is no number of steps; use 0 or more."),
        ({"outer_optimizer": "adam"}, "outer_optimizer='adam' is not a choice; use 'average' or"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate=0.0 is no learning rate; use a number"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is no momentum; use a number of 0 or more"),
    ],
)
def test_a_value_that_is_none_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentsError, match=sentence):
        EngineOptions(**settings)


def test_former_names_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    former = {
        "features": {"a": Column()},
        "segments_per_stage": (2, 3),
        "memory_budget_bytes": 10**9,
        "exact_tied_gradients": False,
        "float32_gradients": False,
        "zero": 1,
    }
    with caplog.at_level(logging.WARNING):
        options = EngineOptions(**parallel._todays_options(former))
    assert options.feature_dict == {"a": Column()} == options.features
    assert options.partition == (2, 3) and options.memory_budget == 10**9
    assert options.tied_gradients == "step" and not options.exact_tied_gradients
    assert options.gradient_sums == "own" and not options.float32_gradients
    assert "The option features is today called feature_dict." in caplog.text
    with pytest.raises(ArgumentsError, match="memory_budget_bytes is today called memory_budget;"):
        parallel._todays_options({"memory_budget_bytes": 1, "memory_budget": 2})


def test_names() -> None:
    assert {"schedule", "zero", "recompute"} <= set(PARALLEL_OPTIONS)


def test_sizes_are_options_as_people_write_them() -> None:
    assert EngineOptions(memory_budget="80GB").memory_budget == 80 * 10**9  # type: ignore[arg-type]
    with pytest.raises(ArgumentsError, match="memory_budget='lots' is not a size; use a number"):
        EngineOptions(memory_budget="lots")  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [plan, rehearse, memory])
def test_commands_that_plan_have_a_flag_for_all_that_changes_a_plan(command: Any) -> None:
    assert {*LAYOUT, *PRICED} <= inspect.signature(command).parameters.keys()

"""Training arguments from a plan: set by it, and refused where they contradict it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import merak
from merak.core import mesh as meshes
from merak.core.errors import ArgumentsError, PlanError
from merak.core.mesh import Mesh
from merak.launch.errors import CommandError
from merak.plan.price.candidate import Candidate
from merak.plan.search.plan_file import plan_of, write_plan
from tests.unit.plan.search.doubles import Double, workload_of

CANDIDATE = Candidate(
    dp=2, pp=2, microbatch=3, num_microbatches=4, partition=(4, 3), zero=1, recompute="full"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "plan.json"
    write_plan(
        file, plan_of(workload_of(nn.Linear(3, 4), torch.bfloat16), Double().price(CANDIDATE))
    )
    return str(file)


def arguments(path: str, dp: int = 2, pp: int = 2, **given: object) -> merak.MerakArguments:
    with meshes.pretended(Mesh(dp, 1, pp, 0, torch.device("cpu"), None)):
        return merak.MerakArguments(output_dir="out", plan=path, **given)  # type: ignore[arg-type]


def test_the_layout_is_that_of_the_plan(path: str) -> None:
    args = arguments(path)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (3, 4)
    assert (args.schedule, args.partition, args.zero) == ("1f1b", [4, 3], 1)
    assert args.recompute == "full" and args.sub_pipelining == "off"
    assert args.bf16 and not args.fp16  # what it was priced with
    with meshes.pretended(Mesh(2, 1, 2, 0, torch.device("cpu"), None)):
        assert dataclasses.replace(args, max_steps=3).partition == [4, 3]


def test_the_same_may_be_said_twice_and_nothing_else(path: str) -> None:
    assert arguments(path, zero=1, partition=[4, 3]).zero == 1
    with pytest.raises(ArgumentsError, match=r"zero=3 contradicts the plan .*, which has 1; leave"):
        arguments(path, zero=3)


def test_other_degrees_are_refused(path: str) -> None:
    expected = r"is for dp=2 tp=1 pp=2 \(4 ranks\), but merak.init laid 2 ranks out as dp=1 tp=1"
    with pytest.raises(ArgumentsError, match=expected):
        arguments(path, dp=1)


def test_init_takes_the_degrees_of_the_plan(path: str) -> None:
    meshes.reset()
    with pytest.raises(PlanError, match=r"dp=4 contradicts the plan .*which has dp=2 × tp=1"):
        merak.init(dp=4, plan=path)
    with pytest.raises(merak.MerakError, match="needs 4 ranks, but this is a single process"):
        merak.init(plan=path)
    meshes.reset()


def test_recipes_take_a_plan(path: str) -> None:
    from merak.cli.recipe.recipe import parse_recipe

    recipe = {"model": {"name": "GPT2LMHeadModel"}, "arguments": {"output_dir": "o"}, "plan": path}
    found = parse_recipe(recipe)
    assert found.parallel.axes() == {"dp": 2, "tp": 1, "pp": 2}
    assert found.arguments["plan"] == path
    assert parse_recipe(recipe | {"parallel": {"dp": 2}}).parallel.num_ranks == 4
    with pytest.raises(CommandError, match=r"parallel.dp=1 contradicts the plan .*which has dp=2"):
        parse_recipe(recipe | {"parallel": {"dp": 1}})

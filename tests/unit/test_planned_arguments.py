"""Training arguments from a plan: set by it, and refused where they contradict it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import HfArgumentParser

import merak
from merak.arguments.planned import (
    chooses_microbatch,
    chooses_plan,
    pinned_arguments,
    set_layout,
    step_samples,
)
from merak.core import mesh as meshes
from merak.core.elastic import GivenDegrees
from merak.core.errors import ArgumentsError, CommandError, PlanError
from merak.core.mesh import Mesh
from merak.plan.price.candidate import Candidate
from merak.plan.search.pinned import Pinned
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


def test_degrees_of_a_parser_are_those_of_the_mesh() -> None:
    words = ["--output_dir", "out", "--tp", "2", "--dp=2"]
    with meshes.pretended(Mesh(2, 2, 1, 0, torch.device("cpu"), None)):
        (args,) = HfArgumentParser(merak.MerakArguments).parse_args_into_dataclasses(words)
        assert (args.dp, args.tp, args.pp) == (2, 2, None)
        with pytest.raises(ArgumentsError, match=r"pp=4 comes too late, since merak.init has laid"):
            merak.MerakArguments(output_dir="out", pp=4)


def test_a_plan_may_come_from_outside(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERAK_PLAN", path)
    with meshes.pretended(Mesh(2, 1, 2, 0, torch.device("cpu"), None)):
        args = merak.MerakArguments(output_dir="out")
    assert (args.plan, args.partition, args.zero) == (path, [4, 3], 1)


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


def open_arguments(given: GivenDegrees, ranks: int = 4, **chosen: object) -> merak.MerakArguments:
    mesh = Mesh(ranks, 1, 1, 0, torch.device("cpu"), None, given=given)
    with meshes.pretended(mesh):
        return merak.MerakArguments(output_dir="out", **chosen)  # type: ignore[arg-type]


def test_a_step_has_as_many_samples_whatever_is_chosen() -> None:
    mesh = Mesh(4, 1, 1, 0, torch.device("cpu"), None, given=GivenDegrees())
    usual = open_arguments(GivenDegrees(), gradient_accumulation_steps=2)
    assert chooses_plan(usual) and usual.plan == "auto"  # as merak.init says
    assert step_samples(usual, mesh) == 8 * 2 * 4  # every rank a replica
    one_replica = dataclasses.replace(mesh, given=GivenDegrees(dp=1))
    assert step_samples(usual, one_replica) == 8 * 2
    given = open_arguments(GivenDegrees(), global_batch=24, per_device_train_batch_size="auto")
    assert step_samples(given, mesh) == 24
    assert pinned_arguments(given, mesh) == Pinned()
    four = open_arguments(GivenDegrees(tp=2), per_device_train_batch_size=4, zero=1, recompute=0.5)
    assert step_samples(four, mesh) == 16
    pinned = pinned_arguments(four, dataclasses.replace(mesh, given=GivenDegrees(tp=2)))
    assert pinned == Pinned(tp=2, microbatch=4, zero=1, recompute="0.5")


def test_arguments_that_are_given_at_their_default_are_pinned() -> None:
    mesh = Mesh(4, 1, 1, 0, torch.device("cpu"), None, given=GivenDegrees())
    usual: dict[str, object] = {"zero": 0, "schedule": "1f1b", "sequence_parallel": False}
    for name, value in usual.items():
        args = open_arguments(GivenDegrees(), **{name: value})
        assert pinned_arguments(args, mesh) == Pinned(**{name: value})  # type: ignore[arg-type]
        assert pinned_arguments(copy.deepcopy(args), mesh) == pinned_arguments(args, mesh)
    none_said = open_arguments(
        GivenDegrees(), recompute=None, partition=None, sub_pipelining="auto"
    )
    assert pinned_arguments(none_said, mesh) == Pinned()


@pytest.mark.parametrize(
    ("line", "pinned"),
    [
        ("", Pinned()),
        ("--zero 0", Pinned(zero=0)),
        ("--schedule=1f1b --zero 1", Pinned(schedule="1f1b", zero=1)),
        ("--sequence-parallel False", Pinned(sequence_parallel=False)),
    ],
)
def test_the_command_line_says_what_is_given(
    line: str, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--output_dir", "out", *line.split()])
    mesh = Mesh(4, 1, 1, 0, torch.device("cpu"), None, given=GivenDegrees())
    with meshes.pretended(mesh):
        (args,) = HfArgumentParser(merak.MerakArguments).parse_args_into_dataclasses()
    assert pinned_arguments(args, mesh) == pinned


def test_a_default_that_is_given_may_not_contradict_the_plan(path: str) -> None:
    assert arguments(path).zero == 1
    with pytest.raises(ArgumentsError, match=r"zero=0 contradicts the plan .*, which has 1; leave"):
        arguments(path, zero=0)


def test_a_layout_that_is_chosen_is_set_once() -> None:
    args = open_arguments(GivenDegrees(), plan="auto")
    set_layout(args, CANDIDATE)
    assert not chooses_plan(args)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (3, 4)
    assert (args.zero, args.recompute, args.partition) == (1, "full", [4, 3])


def test_the_plan_of_init_and_of_the_arguments_is_the_same(path: str) -> None:
    with pytest.raises(ArgumentsError, match=r"contradicts merak.init\(plan='auto'\); give both"):
        open_arguments(GivenDegrees(), plan=path)


def test_open_degrees_fit_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes.reset()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(merak.MerakError, match=r"tp=3 does not fit 4 ranks; use degrees whose"):
        merak.init(tp=3, plan="auto")
    with pytest.raises(merak.MerakError, match=r"elastic=True lowers degrees that are given"):
        merak.init(plan="auto", elastic=True)
    meshes.reset()


@pytest.mark.parametrize(
    ("given", "steps"), [({"global_batch": 48}, 3), ({"gradient_accumulation_steps": 3}, 3)]
)
def test_the_global_batch_sets_the_accumulation_steps(given: dict[str, int], steps: int) -> None:
    with meshes.pretended(Mesh(2, 1, 1, 0, torch.device("cpu"), None)):
        args = merak.MerakArguments(output_dir="out", **given)  # type: ignore[arg-type]
        assert args.gradient_accumulation_steps == steps
        assert dataclasses.replace(args, max_steps=3).gradient_accumulation_steps == steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"global_batch": 40}, r"no multiple of per_device_train_batch_size=8 × dp=2; use a mul"),
        ({"global_batch": 48, "gradient_accumulation_steps": 2}, r"=2 contradicts global_batch=48"),
        ({"global_batch": 0}, r"global_batch=0 is out of range"),
        ({"per_device_train_batch_size": "large"}, r"'large' should be a whole number or 'auto'"),
    ],
)
def test_batches_that_do_not_go_are_refused(given: dict[str, int], said: str) -> None:
    mesh = Mesh(2, 1, 1, 0, torch.device("cpu"), None)
    with meshes.pretended(mesh), pytest.raises(ArgumentsError, match=said):
        merak.MerakArguments(output_dir="out", **given)  # type: ignore[arg-type]


def test_a_command_line_takes_auto() -> None:
    with meshes.pretended(Mesh(2, 1, 1, 0, torch.device("cpu"), None)):
        parser = HfArgumentParser(merak.MerakArguments)
        words = "--output_dir out --per_device_train_batch_size"
        (args,) = parser.parse_args_into_dataclasses([*words.split(), "auto"])
        assert chooses_microbatch(args) and step_samples(args, meshes.current_mesh()) == 16
        assert chooses_microbatch(copy.deepcopy(args))
        (args,) = parser.parse_args_into_dataclasses([*words.split(), "4"])
        assert args.per_device_train_batch_size == 4 and not chooses_microbatch(args)
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out"])
        assert args.per_device_train_batch_size == 8 and not chooses_microbatch(args)


def test_a_plan_has_its_samples_a_step(path: str) -> None:
    assert arguments(path, per_device_train_batch_size="auto").per_device_train_batch_size == 3
    assert arguments(path, global_batch=24).gradient_accumulation_steps == 4
    with pytest.raises(ArgumentsError, match=r"global_batch=8 contradicts the plan .* 24 samples"):
        arguments(path, global_batch=8)


def test_recipes_take_a_plan(path: str) -> None:
    from merak.cli.recipe.recipe import parse_recipe

    recipe = {"model": {"name": "GPT2LMHeadModel"}, "arguments": {"output_dir": "o"}, "plan": path}
    found = parse_recipe(recipe)
    assert found.parallel.axes() == {"dp": 2, "tp": 1, "pp": 2, "cp": 1}
    assert found.arguments["plan"] == path
    assert parse_recipe(recipe | {"parallel": {"dp": 2}}).parallel.num_ranks == 4
    with pytest.raises(CommandError, match=r"parallel.dp=1 contradicts the plan .*which has dp=2"):
        parse_recipe(recipe | {"parallel": {"dp": 1}})
    with pytest.raises(CommandError, match=r"(?s)parallel.dp=1 .*\n.*parallel.ep=2 contradicts"):
        parse_recipe(recipe | {"parallel": {"dp": 1, "ep": 2}})
    with pytest.raises(CommandError, match=r"(?s)parallel.dp=0 .*\n.*parallel.pp=-1 is not a"):
        parse_recipe(recipe | {"plan": None, "parallel": {"dp": 0, "pp": -1}})


def test_recipes_search_a_plan() -> None:
    from merak.cli.recipe.job import Job, num_ranks
    from merak.cli.recipe.recipe import parse_recipe

    recipe = {
        "model": {"name": "GPT2LMHeadModel"}, "arguments": {"output_dir": "o"}, "plan": "auto"
    }  # fmt: skip
    found = parse_recipe(recipe | {"parallel": {"ranks": 4, "pp": 2}})
    assert found.arguments["plan"] == "auto" and found.parallel.dp is None
    assert num_ranks(Job(found, None, "cpu")) == 4
    assert num_ranks(Job(parse_recipe(recipe), None, "cpu")) == 1
    with pytest.raises(CommandError, match=r"parallel.elastic lowers degrees that are given"):
        parse_recipe(recipe | {"parallel": {"elastic": True}})
    with pytest.raises(CommandError, match=r"parallel.ranks=2 is for plan: auto"):
        parse_recipe(recipe | {"parallel": {"ranks": 2}, "plan": None})

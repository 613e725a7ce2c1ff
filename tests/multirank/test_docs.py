"""Commands, programs and files of README and docs do here what the pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from merak.cli.main import main
from merak.cli.recipe.job import Job, check_job
from merak.cli.recipe.recipe import read_recipe
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.measured_times import load_times
from merak.schedule.serialize import load
from tests.multirank.ranks import RankPool
from tests.snippets import programs
from tests.snippets.blocks import Block, blocks
from tests.snippets.commands import commands, commands_of
from tests.tiers import slow

README = "README.md"


def with_kind(kind: str) -> list[Any]:
    return rows([block for block in blocks() if block.kind == kind])


def rows(every: list[Block]) -> list[Any]:
    """Those of the README in every run; those of the other pages are slow."""
    return [block if block.page == README else slow(block) for block in every]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, but for a script of the reader's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import merak\n")
    return tmp_path


def pages() -> list[Any]:
    """The pages with commands that run."""
    found = sorted({command.block.page for command in commands() if command.runs})
    return [page if page == README else slow(page) for page in found]


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_run_in_one_folder(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands():
        if command.runs and command.block.page == page:
            assert main(list(command.words[1:])) == 0, f"{command}: {capsys.readouterr().err}"


@pytest.mark.parametrize("block", with_kind("output"), ids=lambda block: block.place)
def test_an_output_is_that_of_the_command_before_it(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [other for other in blocks() if other.page == block.page and other.line < block.line]
    (command,) = commands_of(before[-1])
    assert main(list(command.words[1:])) == 0
    assert capsys.readouterr().out.strip() == block.text.strip()


@pytest.mark.parametrize("block", rows(programs.programs()), ids=lambda block: block.place)
def test_a_program_runs(block: Block, pool: RankPool, tmp_path: Path) -> None:
    made = pool.run(programs.run, block.ranks or 1, block, str(tmp_path))
    assert all(names == made[0] for names in made)


@pytest.mark.parametrize("block", with_kind("recipe"), ids=lambda block: block.place)
def test_a_recipe_passes_the_checks_before_a_job(block: Block, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(block.text)
    check_job(Job(read_recipe(folder / "recipe.yaml"), None, "cpu", False))


@pytest.mark.parametrize("block", with_kind("cluster"), ids=lambda block: block.place)
def test_a_cluster_is_read(block: Block, folder: Path) -> None:
    (folder / "cluster.yaml").write_text(block.text)
    assert parse_cluster("cluster.yaml").nodes


@pytest.mark.parametrize("block", with_kind("schedule"), ids=lambda block: block.place)
def test_a_schedule_is_read(block: Block, folder: Path) -> None:
    (folder / "mine.txt").write_text(block.text)
    schedule = load(folder / "mine.txt")
    assert schedule.name == "mine" and schedule.num_ranks == 2
    assert main(["schedule", "mine.txt"]) == 0


@pytest.mark.parametrize("block", with_kind("times"), ids=lambda block: block.place)
def test_times_are_read(block: Block, folder: Path) -> None:
    (folder / "times.json").write_text(block.text)
    names = [segment["name"] for segment in json.loads(block.text)["segments"]]
    assert load_times(folder / "times.json", names)[0].forward_s > 0

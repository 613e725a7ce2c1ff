"""A mesh that nothing runs on: trainers of others, and a process that ends."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from merak.core import mesh
from merak.core.errors import MeshError
from merak.core.mesh import Mesh, mark_used, set_mesh
from merak.core.start.unused_mesh import split_degrees, watch_for_no_use
from tests.tiers import one_in


def job(dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    return Mesh(dp, tp, pp, 0, torch.device("cpu"), None, cp=cp, ep=ep)


@pytest.fixture(autouse=True)
def none() -> Iterator[None]:
    yield
    mesh.reset()


class OwnTrainer(Trainer):
    def __init__(self, text: str) -> None:
        raise AssertionError("this is refused before anything is done")


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {"cp": 2}, {"ep": 2, "dp": 2}])
def test_a_trainer_of_others_is_refused_where_it_is_made(degrees: dict[str, int]) -> None:
    set_mesh(job(**degrees))
    watch_for_no_use()
    for made in (Trainer, lambda: OwnTrainer("model")):
        with pytest.raises(MeshError, match=r"rainer does not run on the mesh.*merak.MerakTrainer"):
            made()  # type: ignore[operator]


def test_replicas_and_no_mesh_are_no_matter_of_merak() -> None:
    set_mesh(job(dp=2))
    watch_for_no_use()
    with pytest.raises(AssertionError):
        OwnTrainer("model")
    mesh.reset()
    with pytest.raises(AssertionError):
        OwnTrainer("model")
    assert list(inspect.signature(Trainer).parameters)[:2] == ["model", "args"]
    assert list(inspect.signature(OwnTrainer).parameters) == ["text"]


def test_degrees_that_are_to_be_chosen_count() -> None:
    assert split_degrees(job(dp=4)) == ""
    assert split_degrees(job(dp=4, tp=2, pp=2)) == "tp=2, pp=2"


def test_a_mesh_is_used_once_it_is_marked() -> None:
    assert not mesh.is_used()
    mark_used()
    assert mesh.is_used()
    mesh.reset()
    assert not mesh.is_used()


ENDING = """
import sys, torch
from merak.core.mesh import Mesh, mark_used, set_mesh
from merak.core.start.unused_mesh import watch_for_no_use
set_mesh(Mesh(1, 1, 2, 0, torch.device("cpu"), None))
watch_for_no_use()
assert "transformers.trainer" not in sys.modules
if sys.argv[1] == "used":
    mark_used()
if sys.argv[1] == "trains":
    from transformers import Trainer
    Trainer()
"""


@one_in(3)
@pytest.mark.parametrize(
    "way,sentence",
    [("ends", "nothing has run on the mesh of merak.init(pp=2)"), ("used", None),
     ("trains", "MeshError: Trainer does not run on the mesh of merak.init(pp=2)")],
)  # fmt: skip
def test_a_process_that_ends_says_that_nothing_ran(way: str, sentence: str | None) -> None:
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", ENDING, way],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "merak.init(" in line]
    assert len(said) == (sentence is not None), done.stderr
    assert sentence is None or sentence in said[0]

"""Teachers and students of the same structure, and that they are sharded alike."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import Replicate
from merak.graph.tensor_parallel.search.twins import find_twins


def metas(model: nn.Module) -> dict[str, TensorMeta]:
    return {
        name: TensorMeta(tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    }


def stack(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)))


def frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


def pairs_of(**children: nn.Module) -> set[tuple[str, str]]:
    """The modules that are twins, of a model with some children."""
    found = find_twins(metas(nn.ModuleDict(children)))
    assert all(t.rpartition(".")[2] == s.rpartition(".")[2] for t, s in found.items())
    return {(t.rpartition(".")[0], s.rpartition(".")[0]) for t, s in found.items()}


BODY, HEAD = stack(8, 8, 16), stack(16, 4, 4)


def test_modules_of_one_structure_are_twins() -> None:
    expected = {("target.0.0", "online.0.0"), ("target.1.0", "online.1.0")}
    assert pairs_of(online=BODY, target=frozen(BODY)) == expected
    assert pairs_of(target=frozen(BODY), online=BODY, other=HEAD) == expected


def test_a_student_may_have_more() -> None:
    online = nn.Sequential(BODY, HEAD, nn.Linear(4, 4))
    target = nn.Sequential(frozen(BODY), frozen(HEAD))
    found = pairs_of(online=online, target=target)
    assert {s for _, s in found} == {f"online.{i}.{j}.0" for i in (0, 1) for j in (0, 1)}
    assert all(t == s.replace("online", "target") for t, s in found)


def test_the_likest_of_several_students_is_the_twin() -> None:
    two = nn.ModuleDict({"left": copy.deepcopy(BODY), "right": copy.deepcopy(BODY)})
    found = pairs_of(online=two, target=frozen(two))
    assert all(t == s.replace("online", "target") for t, s in found)


def test_single_layers_are_twins_beside_each_other() -> None:
    assert pairs_of(q=nn.Linear(4, 4), k=frozen(nn.Linear(4, 4))) == {("k", "q")}
    # Of several, nobody knows which.
    assert not pairs_of(q=nn.Linear(4, 4), v=nn.Linear(4, 4), k=frozen(nn.Linear(4, 4)))


@pytest.mark.parametrize("trained", [True, False])
def test_without_a_teacher_or_a_student_there_are_none(trained: bool) -> None:
    both = {"a": copy.deepcopy(BODY), "b": copy.deepcopy(BODY)}
    assert not find_twins(metas(nn.ModuleDict(both).requires_grad_(trained)))


class Pair(nn.Module):
    """A teacher whose targets are compared with what a student and its predictor give."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = stack(8, 8, 8, 8, 8), nn.Linear(8, 8)
        self.target = frozen(self.online)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.predictor(self.online(x)) - self.target(x)).square().mean()}


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return build_graph(GraphSource(Pair()), {"x": TensorMeta((4, 8), torch.float32)}, training=True)


def test_twins_are_sharded_alike(graph: ModelGraph) -> None:
    weights = tensor_parallel(graph, None, 2).weights
    twins = find_twins(graph.parameters)
    assert len(twins) == 8
    assert any(student in weights for student in twins.values())
    assert all(weights.get(teacher) == weights.get(student) for teacher, student in twins.items())


def test_what_is_given_for_one_is_done_with_both(graph: ModelGraph) -> None:
    weights = tensor_parallel(graph, {"online.*": Replicate()}, 2).weights
    assert not [name for name in weights if not name.startswith("predictor")]

"""Where ranks stand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from merak.core import mesh
from merak.core.errors import MeshError
from merak.core.mesh import Mesh, crosses_nodes


def mesh_of(dp: int, tp: int, pp: int, rank: int = 0) -> Mesh:
    return Mesh(dp, tp, pp, rank, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("tp", "pp", "ranks_per_node", "crosses"),
    [(8, 2, 8, False), (4, 4, 8, False), (16, 1, 8, True), (3, 4, 4, True), (4, 1, 8, False)],
)
def test_tensor_parallel_groups_of_consecutive_ranks_fit_nodes_they_divide(
    tp: int, pp: int, ranks_per_node: int, crosses: bool
) -> None:
    found = mesh_of(1, tp, pp)
    assert crosses_nodes(found, ranks_per_node) == crosses
    groups = [range(first, first + tp) for first in range(0, found.world_size, tp)]
    nodes = [{rank // ranks_per_node for rank in group} for group in groups]
    assert any(len(node) > 1 for node in nodes) == crosses


def test_tensor_parallelism_across_nodes_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh, "_connect", lambda dp, tp, pp, *_: mesh_of(dp, tp, pp))
    mesh.reset()
    with caplog.at_level(logging.WARNING):
        mesh.init(tp=4, device="cpu")
    mesh.reset()
    assert "tp=4 spans nodes of 2 ranks" in caplog.text
    caplog.clear()
    mesh.init(tp=2, pp=2, device="cpu")
    mesh.reset()
    assert caplog.text == ""


def test_ranks_are_laid_out_with_tp_fastest() -> None:
    places = [(m.pp_rank, m.dp_rank, m.tp_rank) for m in (mesh_of(2, 2, 2, r) for r in range(8))]
    assert places == [(p, d, t) for p in range(2) for d in range(2) for t in range(2)]
    assert mesh_of(2, 2, 2, rank=5).rank_at(0) == 1


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device | int]]:
    """A machine that says that it has three GPUs; which of them were made the current one."""
    chosen: list[torch.device | int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    mesh.reset()
    yield chosen
    mesh.reset()


def test_a_single_process_computes_on_the_gpu_that_it_names(
    three_gpus: list[torch.device | int],
) -> None:
    assert mesh.init(device="cuda:2").device == torch.device("cuda", 2)
    assert three_gpus == [torch.device("cuda", 2)]


def test_a_gpu_that_is_not_there_is_refused(three_gpus: list[torch.device | int]) -> None:
    with pytest.raises(MeshError, match=r"device='cuda:3' is not here: torch sees 3 GPUs"):
        mesh.init(device="cuda:3")


def test_a_rank_of_a_job_computes_on_the_gpu_of_its_own_number(
    three_gpus: list[torch.device | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(MeshError, match=r"device='cuda:0' was asked for on local rank 1"):
        mesh.init(device="cuda:0")
    assert three_gpus == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "mpi"}, "backend='mpi' is not supported; use 'gloo' or 'nccl', or leave it"),
        ({"backend": "nccl"}, "backend='nccl' carries tensors of GPUs alone; use 'gloo' on the"),
        ({"device": "gpu"}, "device='gpu' is not supported; use 'cpu' or 'cuda'."),
        ({"device": "meta"}, "device='meta' is not supported; use 'cpu' or 'cuda'."),
        ({"timeout_s": "long"}, "timeout_s='long' is not a time to wait; use a number of seconds"),
        ({"timeout_s": 0}, "timeout_s=0 is not a time to wait"),
        ({"dp": True}, "dp=True is not a degree; use a whole number of 1 or more."),
    ],
)
def test_one_rank_refuses_what_several_would(settings: dict[str, Any], said: str) -> None:
    mesh.reset()
    with pytest.raises(MeshError) as caught:
        mesh.init(**{"device": "cpu", **settings})
    assert said in str(caught.value)
    mesh.init(device="cpu", backend="gloo")
    mesh.reset()

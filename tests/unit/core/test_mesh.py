"""Where ranks stand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import merak
from merak.core import mesh
from merak.core.elastic import Degrees, check_expert_degree
from merak.core.errors import ArgumentsError, MeshError
from merak.core.mesh import AXES, EXPERT_REPLICAS, REPLICAS, Mesh, crosses_hosts
from merak.core.start import init as start
from merak.core.start.device import ALLOCATOR_VARIABLES, pick_device
from merak.core.start.init import QUEUES, _warn_of_hosts


def mesh_of(dp: int, tp: int, pp: int, rank: int = 0) -> Mesh:
    return Mesh(dp, tp, pp, rank, torch.device("cpu"), None)


def on(*numbers: int) -> tuple[str, ...]:
    """Hosts with these numbers of consecutive ranks."""
    return tuple(f"host-{host}" for host, number in enumerate(numbers) for _ in range(number))


@pytest.mark.parametrize(
    ("degrees", "hosts", "across"),
    [
        ((1, 8, 2), on(8, 8), "pp"),
        ((2, 4, 2), on(8, 8), "pp"),
        ((4, 4, 1), on(8, 8), "dp"),
        ((2, 1, 2), on(2, 2), "pp"),  # rather than dp, which would also fit
        ((1, 16, 1), on(8, 8), "tp"),
        ((1, 3, 4), on(4, 4, 4), "tp pp"),
        ((1, 2, 3), on(2, 4), "pp"),
        ((1, 2, 2), on(3, 1), "tp pp"),
        ((2, 2, 2), on(6, 2), "dp pp"),
        ((1, 3, 2), on(3, 3), "pp"),
        ((1, 2, 2), ("a", "b", "a", "b"), "tp"),
        ((2, 2, 2), (), ""),
    ],
)
def test_consecutive_ranks_keep_tp_inside_hosts_and_pp_across(
    degrees: tuple[int, int, int], hosts: tuple[str, ...], across: str
) -> None:
    found = dataclasses.replace(mesh_of(*degrees), hosts=hosts)
    assert [axis for axis in ("tp", "dp", "pp") if crosses_hosts(found, axis)] == across.split()


@pytest.mark.parametrize("degrees", [(2, 2, 3), (3, 2, 2), (1, 4, 3), (6, 2, 1)])
def test_no_other_order_of_ranks_keeps_more_groups_inside_hosts(
    degrees: tuple[int, int, int],
) -> None:
    dp, tp, _ = degrees
    for first in range(1, 12):
        found = dataclasses.replace(mesh_of(*degrees), hosts=on(first, 12 - first))
        # Each rank is in one group: groups fill both hosts, or one of them spans both.
        assert crosses_hosts(found, "tp") == (first % tp != 0)
        if first % (dp * tp) == 0:
            assert not crosses_hosts(found, "dp")


@pytest.mark.parametrize(
    ("tp", "hosts", "advice"),
    [
        (4, on(2, 2), "(2 ranks on host-0, 2 on host-1)"),
        (2, on(1, 3), "start a multiple of 2 ranks on every host, or use a tp that divides"),
        (2, ("a", "b", "a", "b"), "number each host's ranks consecutively, as torchrun does"),
    ],
)
def test_tensor_parallelism_across_hosts_is_warned_of(
    tp: int,
    hosts: tuple[str, ...],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)

    def connect(degrees: Any, *rest: Any) -> Mesh:
        return dataclasses.replace(mesh_of(*degrees[:3]), hosts=hosts)

    monkeypatch.setattr(start, "connect", connect)
    mesh.reset()
    merak.init(tp=tp, pp=4 // tp, device="cpu")
    mesh.reset()
    assert f"tp={tp} spans hosts" in caplog.text
    assert advice in caplog.text
    caplog.clear()
    merak.init(pp=4, device="cpu")
    mesh.reset()
    assert caplog.text == ""


def test_fewer_ranks_are_refused_or_get_smaller_degrees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "connect", lambda degrees, *rest: mesh_of(*degrees[:3]))
    mesh.reset()
    with pytest.raises(MeshError) as refused:
        merak.init(dp=2, pp=2, device="cpu")
    assert str(refused.value) == (
        "dp=2 × tp=1 × pp=2 = 4 ranks, but torchrun started 2; make the product of the degrees "
        "equal the number of ranks, such as dp=1 × tp=1 × pp=2, or allow smaller degrees with "
        "merak.init(…, elastic=True)."
    )
    for degrees, fix in (  # of which none fit, and too few for the ranks
        ({"tp": 3}, "or start 3"),
        ({"dp": 1}, "such as dp=2 × tp=1 × pp=1"),
    ):
        with pytest.raises(MeshError, match=rf"equal the number of ranks, {fix}\.$"):
            merak.init(**degrees, device="cpu", elastic=True)
    found = merak.init(dp=2, pp=2, device="cpu", elastic=True)
    assert (found.dp, found.tp, found.pp, found.wanted_dp) == (1, 1, 2, 2)
    mesh.reset()
    assert caplog.messages == [
        "2 ranks are there for dp=2 × tp=1 × pp=2: running as dp=1 × tp=1 × pp=2."
    ]


@pytest.mark.parametrize(("restarts", "warned"), [(3, True), (0, False)])
def test_a_host_that_could_not_come_back_is_warned_of(
    restarts: int,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    start._warn_of_hosts(dataclasses.replace(mesh_of(2, 1, 1), hosts=on(1, 1)))
    start._warn_of_hosts(mesh_of(2, 1, 1))
    assert len(caplog.messages) == warned
    assert ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in caplog.text) == warned


def test_ranks_are_laid_out_with_tp_fastest() -> None:
    places = [(m.pp_rank, m.dp_rank, m.tp_rank) for m in (mesh_of(2, 2, 2, r) for r in range(8))]
    assert places == [(p, d, t) for p in range(2) for d in range(2) for t in range(2)]
    assert mesh_of(2, 2, 2, rank=5).rank_at(0) == 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator of GPU memory is set to, where nobody else has."""
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return settings


@pytest.fixture
def three_gpus(
    monkeypatch: pytest.MonkeyPatch, allocator: list[str]
) -> Iterator[list[torch.device | int]]:
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
    assert merak.init(device="cuda:2").device == torch.device("cuda", 2)
    assert three_gpus == [torch.device("cuda", 2)]


def test_segments_of_a_gpus_memory_grow_unless_the_user_has_chosen(
    three_gpus: list[torch.device | int],
    allocator: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is allocated, and without a variable that other processes would inherit."""
    pick_device("cpu")
    assert allocator == []
    pick_device("cuda")
    assert allocator == ["expandable_segments:True"]
    assert not {*ALLOCATOR_VARIABLES} & {*os.environ}
    for name in ALLOCATOR_VARIABLES:
        with monkeypatch.context() as chosen:
            chosen.setenv(name, "max_split_size_mb:512")
            pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pick_device("cuda")
    assert len(allocator) == 1


@pytest.mark.parametrize(
    ("pp", "device", "queues", "warns"),
    [
        (2, "cuda", "1", True),
        (1, "cuda", "1", False),
        (2, "cpu", "1", False),
        (2, "cuda", "8", False),
    ],
)
def test_one_hardware_queue_is_warned_of_where_stages_wait_for_one_another(
    pp: int,
    device: str,
    queues: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(QUEUES, queues)
    _warn_of_hosts(mesh.Mesh(1, 1, pp, 0, torch.device(device), None))
    warned = [line for line in caplog.messages if "CUDA_DEVICE_MAX_CONNECTIONS=1" in line]
    assert len(warned) == warns
    assert all("stages of pp=2 may wait for one another for ever" in line for line in warned)


def test_a_gpu_that_is_not_there_is_refused(three_gpus: list[torch.device | int]) -> None:
    with pytest.raises(MeshError, match=r"device='cuda:3' is not here: torch sees 3 GPUs"):
        merak.init(device="cuda:3")


def test_a_rank_of_a_job_computes_on_the_gpu_of_its_own_number(
    three_gpus: list[torch.device | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(MeshError, match=r"device='cuda:0' was asked for on local rank 1"):
        merak.init(device="cuda:0")
    assert three_gpus == []


def test_a_rank_that_sees_one_gpu_of_several_computes_on_it(
    three_gpus: list[torch.device | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers may leave each rank its own GPU to see, which then has the number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pick_device("cuda") == torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(MeshError, match="local rank 3 has no GPU of its own: 1 here"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (None, "start it with `torchrun --nproc-per-node 4 script.py`."),
        ("1", "start it with `torchrun --nproc-per-node 4 script.py`."),  # torchrun is to follow
        ("4", "srun has started several, which do not know of one another: let it start one"),
    ],
)
def test_a_single_process_is_told_how_to_start_several(
    tasks: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    if tasks is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    with pytest.raises(MeshError) as caught:
        merak.init(dp=2, pp=2)
    assert said in str(caught.value)


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
        ({"ep": 0}, "ep=0 is not a degree; use a whole number of 1 or more."),
        (
            {"ep": 2},
            "ep=2 does not divide dp × cp = 1, the replicas that have the experts",
        ),
        ({"ep": 2, "plan": "auto"}, "ep=2 does not divide the number of ranks (1)"),
    ],
)
def test_one_rank_refuses_what_several_would(settings: dict[str, Any], said: str) -> None:
    mesh.reset()
    with pytest.raises(MeshError) as caught:
        merak.init(**{"device": "cpu", **settings})
    assert said in str(caught.value)
    merak.init(device="cpu", backend="gloo")
    mesh.reset()


@pytest.mark.parametrize(
    ("ep", "degrees", "fix"),
    [
        (4, Degrees(8, 2, 1), "use ep=2, or ep=1, which splits every expert, or tp=1 and a "
         "multiple of 4 replicas."),
        (4, Degrees(3, 1, 1, 2), "use ep=1, 2, 3, 6, or tp=4."),
    ],
)  # fmt: skip
def test_experts_are_shared_out_over_tp_or_replicas(ep: int, degrees: Degrees, fix: str) -> None:
    assert [check_expert_degree(own, degrees) for own in (None, 1)] == [1, 1]
    assert check_expert_degree(degrees.tp, degrees) == degrees.tp
    assert check_expert_degree(6, Degrees(3, 1, 1, 2)) == 6
    with pytest.raises(MeshError) as caught:
        check_expert_degree(ep, degrees)
    assert str(caught.value).endswith(fix)


def test_replicas_that_share_out_experts_lie_side_by_side() -> None:
    device = torch.device("cpu")
    meshes = [Mesh(4, 1, 2, rank, device, None, cp=2, ep=4) for rank in range(16)]
    assert all(m.spreads_experts and m.shard_axis == "ep" for m in meshes)
    assert [m.shard_rank for m in meshes] == [0, 1, 2, 3] * 4
    assert [m.expert_replicas_rank for m in meshes] == ([0] * 4 + [1] * 4) * 2
    assert meshes[5].peers("ep") == (4, 6, 7)
    assert meshes[5].peers(EXPERT_REPLICAS) == (1,)
    inside = Mesh(4, 2, 1, 3, device, None, ep=2)
    assert (inside.shard_axis, inside.shard_rank, inside.expert_replicas) == ("tp", 1, 4)


def test_axes_lie_as_documented_and_replicas_are_dp_and_cp_together() -> None:
    device = torch.device("cpu")
    meshes = [Mesh(2, 2, 2, rank, device, None, cp=3) for rank in range(24)]
    places = [(m.pp_rank, m.dp_rank, m.cp_rank, m.tp_rank) for m in meshes]
    assert AXES == ("pp", "dp", "cp", "tp")
    assert places == sorted(set(places)) and meshes[0].world_size == 24
    assert meshes[0].peers("cp") == (2, 4)
    assert meshes[0].peers("dp") == (6,)
    assert meshes[0].peers("pp") == (12,)
    assert meshes[0].peers(REPLICAS) == (2, 4, 6, 8, 10)
    assert meshes[3].rank_at(1) == 15


@pytest.mark.parametrize("name", ["dpp", "unknown"])
def test_arguments_that_init_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ArgumentsError, match=f"merak.init has no argument '{name}'") as caught:
        merak.init(**{name: 2})
    assert isinstance(caught.value, TypeError)  # as Python's own


def test_options_that_parallelize_does_not_have_are_refused() -> None:
    with pytest.raises(ArgumentsError, match="no argument 'shedule'; did you mean schedule"):
        merak.parallelize(torch.nn.Linear(1, 1), {}, shedule="1f1b")


def test_a_second_equal_call_returns_the_mesh() -> None:
    first = merak.init(device="cpu")
    assert merak.init(device="cpu") is first and merak.init(1, tp=1, device="cpu") is first
    assert merak.init(1, 1, 1, ep=1, backend="gloo", device="cpu") is first


@pytest.mark.parametrize(
    "other", [{"dp": 2}, {"pp": 4}, {"timeout_s": 5.0}, {"elastic": True}, {"plan": "auto"}]
)
def test_a_second_call_for_another_mesh_is_refused(other: dict[str, Any]) -> None:
    merak.init(device="cpu")
    with pytest.raises(MeshError, match=r"merak.init\(device='cpu'\) has laid the ranks out"):
        merak.init(**other, device="cpu")


@pytest.mark.parametrize("most_channels", [None, 8])
def test_groups_of_a_gpu_are_split_at_once_and_small_where_they_only_transfer(
    monkeypatch: pytest.MonkeyPatch, most_channels: int | None
) -> None:
    """Of the communicator of all ranks, which keeps its own options."""
    gpu, split, connected = torch.device("meta"), [], []
    config = SimpleNamespace(max_ctas=32)
    backend = SimpleNamespace(supports_splitting=True, options=SimpleNamespace(config=config))
    whole = SimpleNamespace(bound_device_id=gpu, _get_backend=lambda _: backend)
    monkeypatch.setattr(mesh, "_whole", lambda: whole)
    monkeypatch.setattr(mesh, "carried_device", lambda: gpu)
    monkeypatch.setattr(mesh.dist, "split_group", lambda **given: split.append(given) or "group")
    monkeypatch.setattr(mesh, "connect_group", connected.append)
    group = mesh.group_of_lines([[0, 2], [1, 3]], "groups of", most_channels)
    (given,) = split
    assert group == "group" and given["split_ranks"] == [[0, 2], [1, 3]]
    assert config.max_ctas == 32
    if most_channels is None:
        assert given["pg_options"] is None and connected == ["group"]
    else:  # whose pairs meet in transfers: an all-reduce would give it the buffers of one
        assert given["pg_options"].config.max_ctas == 8 and not connected

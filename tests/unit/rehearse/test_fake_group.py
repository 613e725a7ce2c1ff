"""Process groups of a job with one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from merak.core.errors import MeshError
from merak.core.mesh import Mesh, current_mesh
from merak.core.rank0 import decide_on_rank0
from merak.ops.collectives import gather_from, reduce_scatter_to
from merak.rehearse.fake_group import RECEIVED_SCALE, Traffic
from merak.rehearse.fake_job import fake_job


@pytest.fixture
def job():
    traffic = Traffic()
    with fake_job(Mesh(16, 8, 8, 700, torch.device("cpu"), None), traffic) as mesh:
        yield mesh, traffic
    assert not dist.is_initialized()


def test_a_rank_of_a_large_job_stands_alone(job):
    mesh, _ = job
    assert current_mesh() is mesh and dist.get_world_size() == 1024
    assert dist.get_process_group_ranks(mesh.group("tp")) == list(range(696, 704))
    assert dist.get_process_group_ranks(mesh.group("dp"))[:3] == [644, 652, 660]
    assert dist.get_process_group_ranks(mesh.group("pp"))[:2] == [60, 188]


def test_collectives_bring_what_this_rank_has(job):
    mesh, traffic = job
    own = torch.arange(4.0)
    dist.all_reduce(own, group=mesh.group("dp"))
    assert own.tolist() == [0, 1, 2, 3]
    assert gather_from(own, 0, (32,), "tp").tolist() == own.tolist() * 8
    assert reduce_scatter_to(torch.arange(16.0), 0, (16,), "tp").tolist() == [8, 9]
    found = [None] * 8
    dist.all_gather_object(found, {"rank": 700}, group=mesh.group("pp"))
    assert found == [{"rank": 700}] * 8
    dist.barrier()
    kinds = [call.kind for call in traffic.calls]
    assert kinds == ["all_reduce", "all_gather", "reduce_scatter", *["all_gather"] * 2, "barrier"]
    assert [call.num_bytes for call in traffic.calls[:3]] == [16, 128, 64]
    assert traffic.calls[1].ranks == tuple(range(696, 704))


def test_received_tensors_are_finite_and_no_zeros(job):
    mesh, traffic = job
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = torch.full((64,), torch.nan, dtype=dtype)
        dist.recv(tensor, mesh.rank_at(4), mesh.group("pp"))
        assert tensor.abs().max() <= 2 * RECEIVED_SCALE and tensor.abs().max() > 0
    numbers = torch.full((3,), 7)
    dist.irecv(numbers, mesh.rank_at(4), mesh.group("pp")).wait()
    assert numbers.tolist() == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), before)  # the job's draws are its own
    assert traffic.calls[0].ranks == (700, mesh.rank_at(4)) and traffic.calls[0].num_bytes == 256


def test_what_rank_0_decides_is_decided_here(job):
    mesh, _ = job
    assert decide_on_rank0(mesh, "the answer", lambda: 42) == 42


def test_a_rank_of_a_real_job_is_no_place_for_it(job):
    mesh, traffic = job
    with pytest.raises(MeshError, match="run it without torchrun"), fake_job(mesh, traffic):
        pass

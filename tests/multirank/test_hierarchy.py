"""Hierarchical reductions: the same training as at once, and what is sent between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import merak
from merak.core import mesh as meshes
from merak.core.errors import ScheduleError
from merak.core.start import connect
from merak.engine.comm import replica_levels
from tests.multirank.ranks import RankPool
from tests.multirank.test_expert_dispatch import trained
from tests.multirank.test_parallelize import Classifier, adamw, batch_of
from tests.multirank.training import Layout
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases

STEPS = 3
FEATURES = {
    "wide.0": merak.Column(), "wide.2": merak.Row(),
    "again.0": merak.Column(), "again.2": merak.Row(),
}  # fmt: skip


def init(layout: Layout, hosts: str) -> Any:
    """A job whose ranks believe to be on hosts of these names, one letter each."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    meshes.set_mesh(replace(mesh, hosts=tuple(hosts) if len(set(hosts)) > 1 else ()))
    return mesh


def build(mesh: Any, **options: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    batches = [
        {n: t.chunk(min(mesh.dp, 4))[mesh.dp_rank % 4] for n, t in batch_of(step, "loss").items()}
        for step in range(STEPS)
    ]
    chosen = {"feature_dict": FEATURES} if mesh.tp > 1 else {}
    parallel = merak.parallelize(
        Classifier(), batches[0], optimizer=adamw, num_microbatches=2, bucket_bytes=2000,
        **chosen, **options,
    )  # fmt: skip
    return parallel, batches


def train(layout: Layout, hosts: str, options: dict[str, Any]) -> list[Any]:
    """Losses and parameters at once and by hierarchy, and how many collectives had two levels."""
    mesh = init(layout, hosts)
    found = []
    for value in ("off", "on"):
        parallel, batches = build(mesh, hierarchical_reductions=value, **options)
        started = mock.Mock(wraps=replica_levels.Levels.start)
        with mock.patch.object(
            replica_levels.Levels, "start", lambda *own, started=started: started(*own)
        ):
            losses = [float(parallel.step(batch)) for batch in batches]
        parallel.check_replicas()  # all ranks have stepped the same, bit by bit
        state = parallel.gather_state_dict()
        found.append((losses, state, started.call_count))
    return found


@pytest.mark.parametrize(
    ("layout", "hosts", "options"),
    [
        ((4, 1, 1), "abab", {}),
        slow((4, 1, 1), "aabb", {"zero": 2}),
        slow((4, 1, 1), "abab", {"zero": 3}),
        slow((4, 2, 1), "aaaabbbb", {"zero": 1, "sequence_parallel": True}),
        slow((4, 1, 2), "aabbccdd", {"schedule": "interleaved_1f1b", "zero": 2}),
        slow((2, 1, 2), "abab", {"schedule": "chimera"}),
        slow((6, 1, 1), "aaaabb", {}),
    ],
)
def test_training_is_that_of_reductions_at_once(
    pool: RankPool, layout: Layout, hosts: str, options: dict[str, Any]
) -> None:
    ranks = layout[0] * layout[1] * layout[2]
    for rank, found in enumerate(pool.run(train, ranks, layout, hosts, options)):
        (plain, before, none), (losses, after, started) = found
        assert none == 0 and started > 0
        # Sums of other orders, whose rounding AdamW's first steps may make large.
        assert losses == pytest.approx(plain, rel=1e-5)
        for name, tensor in before.items() if rank == 0 else ():
            torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def train_experts(degrees: dict[str, int], hosts: str, options: dict[str, Any]) -> Any:
    """A mixture of experts at once and by hierarchy, and how many collectives had two levels."""
    found = []
    started = mock.Mock(wraps=replica_levels.Levels.start)
    with (
        mock.patch.object(connect, "host_names", lambda *_: tuple(hosts)),
        mock.patch.object(replica_levels.Levels, "start", lambda *own: started(*own)),
    ):
        for value in ("off", "on"):
            found.append(trained("mixtral", degrees, {"hierarchical_reductions": value, **options}))
            merak.core.mesh.reset()
            assert bool(started.call_count) is (value == "on")
    return found


@pytest.mark.parametrize(
    ("degrees", "hosts", "options"),
    [
        slow({"dp": 2, "cp": 2, "ep": 2}, "aabb", {}),
        slow({"dp": 4, "ep": 2}, "abab", {"zero": 2}),
    ],
)
def test_replicas_with_shared_tokens_and_experts_of_their_own(
    pool: RankPool, degrees: dict[str, int], hosts: str, options: dict[str, Any]
) -> None:
    for (plain, before), (losses, after) in pool.run(train_experts, 4, degrees, hosts, options):
        assert losses == pytest.approx(plain, rel=1e-5)
        cases.assert_gradients_equal(after, before)


def sent(zero: int, value: str) -> int:
    """Bytes of the tensors that a step's collectives have between nodes."""
    mesh = init((4, 1, 1), "aabb")
    parallel, batches = build(mesh, hierarchical_reductions=value, zero=zero)
    total: list[int] = []
    hosts = meshes.current_mesh().hosts

    def counted(call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_process_group_ranks(kwargs.get("group"))
            if len({hosts[rank] for rank in ranks}) > 1:
                total.append(max(a.nbytes for a in args if isinstance(a, torch.Tensor)))
            return call(*args, **kwargs)

        return called

    places = [(dist, "all_reduce")]
    places += [(replica_levels, name) for name in ("reduce_scatter", "all_gather")]
    parallel.step(batches[0])
    _ = parallel.engine.parameters  # waits for what the step has left under way
    for where, name in places:
        mock.patch.object(where, name, counted(getattr(where, name))).start()
    parallel.step(batches[1])
    _ = parallel.engine.parameters
    mock.patch.stopall()
    return sum(total)


@pytest.mark.parametrize("zero", [0, slow(2)])
def test_between_nodes_goes_a_tensor_once(pool: RankPool, zero: int) -> None:
    at_once, levels = (pool.run(sent, 4, zero, value)[0] for value in ("off", "on"))
    # Two ranks of a node have a half each; the loss, the norm and a padded element are small.
    assert at_once / 2 <= levels <= at_once / 2 + 200


def refusals() -> list[str]:
    found = []
    for hosts, options in (
        ("aaaa", {}),
        ("abcd", {}),
        ("aabb", {"gradient_compression": "bf16"}),
        ("aabb", {"local_steps": 2}),
    ):
        merak.core.mesh.reset()
        mesh = init((4, 1, 1), hosts)
        with pytest.raises(ScheduleError) as caught:
            build(mesh, hierarchical_reductions="on", **options)
        found.append(str(caught.value))
    return found


def test_one_level_is_refused(pool: RankPool) -> None:
    one_node, one_each, compressed, local = pool.run(refusals, 4)[0]
    assert "all ranks are on one node; use hierarchical_reductions='off'" in one_node
    assert "no stage has several replicas on each of several nodes; use" in one_each
    assert "gradient_compression='bf16' compresses them for one; use one of the two" in compressed
    assert "local_steps=2 leaves their reductions out; use one of the two" in local

"""Bytes that the price charges of collectives over tp and cp are those that a rank sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from merak.data import signature
from merak.graph.segment.build import GraphSource
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice, joint_kernels
from merak.plan.price.candidate import Candidate
from merak.plan.price.segments import joint_parts
from merak.plan.price.step import priced_stages
from merak.plan.price.workload import Workload
from merak.rehearse import rehearsal
from merak.rehearse.charge import Charge, axis_of, charges
from merak.rehearse.fake_group import Call
from tests.tiers import slow

SAMPLES, TOKENS, COUNT = 2, 32, 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip


def workload(kind: str) -> tuple[Workload, dict[str, torch.Tensor]]:
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    else:
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}
        config = transformers.LlamaConfig(**(SIZES | heads if kind == "few heads" else SIZES))
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (SAMPLES * COUNT, TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone()}
    columns = signature({name: column[:SAMPLES] for name, column in batch.items()}).columns
    source = GraphSource(model)
    return Workload(source, lambda _: columns, SAMPLES * COUNT, TOKENS, TOKENS), batch


def charged(job: Workload, candidate: Candidate) -> Counter[tuple[str, str]]:
    """Bytes of a step by axis and kind, as the price has them."""
    found: Counter[tuple[str, str]] = Counter()
    form = candidate.form
    parts = joint_parts(job, form, KernelChoice(), "cpu")
    for number in job.unique(form):
        joint = parts[number]
        assert joint is not None
        kernels = joint_kernels(joint, KernelChoice(), "cpu", COUNT)
        for kernel in (*kernels.forward, *kernels.backward):
            if kernel.collective is not None:
                kind, num_bytes, axis = kernel.collective
                found[axis, kind] += COUNT * int(num_bytes)
    return found


def on_cpus(cluster: Cluster) -> Cluster:
    """The cluster with the CPU's kernels, which the rehearsal runs."""
    nodes = [replace(n, device=replace(n.device, device_type="cpu")) for n in cluster.nodes]
    return Cluster(tuple(nodes))


def sent(calls: list[Call], candidate: Candidate) -> Counter[tuple[str, str]]:
    """Bytes of the collectives over tp and cp inside actions; gradients go over replicas."""
    mesh = candidate.mesh(0, torch.device("cpu"))
    found: Counter[tuple[str, str]] = Counter()
    for call in calls:
        axis = axis_of(call, mesh)
        if call.action is not None and axis in ("tp", "cp"):
            found[axis, call.kind] += call.num_bytes
    return found


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("llama", {"dp": 2, "cp": 2, "tp": 2}),
        ("few heads", {"dp": 2, "cp": 4}),
        ("mixtral", {"dp": 2, "tp": 2, "cp": 2, "ep": 2}),
        slow("llama", {"dp": 2, "cp": 2}),
        slow("mixtral", {"dp": 2, "tp": 2, "ep": 2}),
    ],
)
def test_the_price_charges_what_a_rank_sends(
    kind: str, degrees: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []

    def recorded(own: list[Call], *rest: Any) -> tuple[Charge, ...]:
        calls.extend(own)
        return charges(own, *rest)

    monkeypatch.setattr(rehearsal, "charges", recorded)
    job, batch = workload(kind)
    candidate = Candidate(microbatch=SAMPLES, num_microbatches=COUNT, **degrees)  # type: ignore[arg-type]
    cluster, device = on_cpus(parse_cluster("h100:8")), torch.device("cpu")
    found = rehearsal.rehearse(job, cluster, candidate, 0, batch, device=device, steps=1)
    assert charged(job, candidate) == sent(calls, candidate)
    inside = sum(action.count * action.charged_s for action in found.actions)
    planned = sum(
        COUNT * (whole_s - alone_s)
        for stage in priced_stages(job, cluster, candidate)
        for whole_s, alone_s in (
            (stage.whole.forward_s, stage.compute.forward_s),
            (stage.whole.backward_s, stage.compute.backward_s),
        )
    )
    assert inside == pytest.approx(planned, rel=1e-6)

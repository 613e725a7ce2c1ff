"""Expert parallelism: every rank holds whole experts, and computes their rows.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from merak.core.errors import ShardError
from merak.core.mesh import Mesh
from merak.graph.expert_parallel.apply import exact, expert_parallel, with_experts
from merak.graph.ir.operators import GROUPED_GEMMS, SEPARATE_GEMMS, family
from merak.graph.joint.segment import joint_obstacle
from merak.graph.tensor_parallel.apply import TensorParallel, tensor_parallel
from merak.graph.tensor_parallel.placement import Shard, shape_of
from merak.graph.tensor_parallel.search.cost import FORWARD
from merak.ops import collectives
from merak.ops.expert_capacity import from_places
from merak.ops.expert_dispatch import from_experts, to_experts
from merak.ops.expert_rows import grouped_mm_fallback_rows, grouped_mm_rows
from merak.plan.cost.operators import node_work
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import (
    SMALL,
    Dispatched,
    GroupedProducts,
    PlainTokens,
    Separate,
    Stacked,
    build,
)
from tests.unit.graph.lockstep import assert_parity


@pytest.mark.parametrize(
    "name,degree,sequence",
    [
        ("mixtral", 2, False),
        *(slow(name, 2, True) for name in ("mixtral", "deepseek_v3")),
        *(slow(name, 4, False) for name in ("gpt_oss", "qwen3_moe", "switch", "separate")),
        slow("switch", 2, True),
        ("separate", 2, False),
        ("sorted", 2, False),
        ("grouped", 2, False),
        slow("sorted", 4, False),
    ],
)
def test_gradients_equal_those_of_one_process(name: str, degree: int, sequence: bool) -> None:
    columns = cases.batch(padded=False)
    assert_parity(build(name), columns, None, degree, sequence=sequence, ep=degree)


@pytest.mark.parametrize("name", ["adapted", slow("dbrx")])
def test_stacks_that_are_computed_of_parameters_are_split_by_experts(name: str) -> None:
    """Those of adapters, whose factors have their experts' rows and columns, or rows of one."""
    columns = cases.batch(padded=False)
    model = PlainTokens(Adapted()) if name == "adapted" else build(name)
    graph = cases.traced(model, columns)
    of_experts = {n for n in graph.parameters if re.search("up|down|left|right|experts", n)}
    shards = [expert_parallel(graph, None, 2)(segment)[1] for segment in graph.segments]
    found = {name: shard for own in shards for name, shard in own.items()}
    assert found.keys() == of_experts
    assert of_experts <= tensor_parallel(graph, None, 2).weights.keys()
    if name == "adapted":
        assert (found["layers.0.left"].dim, found["layers.0.left"].parts) == (0, (8,))
        assert (found["layers.0.right"].dim, found["layers.0.right"].parts) == (1, (4, 4))
    for ep in (1, 2):
        assert_parity(model, columns, None, 2, ep=ep)


@pytest.mark.slow
def test_a_rank_whose_experts_get_no_token_has_zero_gradients() -> None:
    model, columns = build("gpt_oss"), cases.batch(padded=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.copy_(torch.tensor([50.0, 50.0, -50.0, -50.0]))
    model(**columns).loss.backward()
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    assert stacks
    for p in stacks:
        assert p.grad is not None
        assert [bool(own.any()) for own in p.grad] == [True, True, False, False]
    model.zero_grad()
    assert_parity(model, columns, None, 2, ep=2)  # of other ranks' experts alone


def test_experts_of_widths_that_no_degree_divides_are_whole_each() -> None:
    """Without `ep`: what cannot be split inside is split by experts."""
    columns, model = cases.batch(padded=False), build("mixtral", intermediate_size=31)
    graph = cases.traced(model, columns)
    experts = {n: p for n, p in tensor_parallel(graph, None, 2).weights.items() if "experts" in n}
    assert {n for n in graph.parameters if ".experts." in n} == experts.keys()
    assert all(isinstance(p, Shard) and p.dim == 0 and p.parts == (4,) for p in experts.values())
    split = tensor_parallel(cases.traced(build("mixtral"), columns), None, 2).weights
    assert not any(p.dim == 0 and p.parts == (4,) for n, p in split.items() if "experts" in n)
    assert_parity(model, columns, None, 2)


class Layered(nn.Module):
    """One such layer, which is one segment."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Dispatched(experts)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers[0](self.stem(x)).square().mean()}


@pytest.mark.parametrize("degree", [2, 4])
def test_experts_of_einsums_are_split_whole(degree: int) -> None:
    torch.manual_seed(0)
    model, columns = Layered(), {"x": torch.randn(12, 16)}
    found = tensor_parallel(cases.traced(model, columns), None, degree, ep=degree).weights
    dims = {name.rpartition(".")[2]: placed.dim for name, placed in found.items()}
    assert {name: dims.get(name) for name in ("up", "bias", "down")} == {
        "up": 0, "bias": 0, "down": 0,
    }  # fmt: skip
    assert_parity(model, columns, None, degree, ep=degree)


@pytest.mark.slow
def test_experts_of_batched_products_are_split_whole() -> None:
    columns = cases.batch(padded=False)
    found = tensor_parallel(cases.traced(build("llama4"), columns), None, 2, ep=2).weights
    assert all(p.dim == 0 for name, p in found.items() if "experts." in name)
    assert_parity(build("llama4"), columns, None, 2, ep=2)


def transfers(parallel: TensorParallel, graph: Any) -> Counter[bool]:
    """Collectives of a whole activation, counted by whether they are in the forward."""
    hidden = cases.BATCH * cases.SEQUENCE * SMALL["hidden_size"]
    found = [t for s in graph.segments for t in parallel.split(s).transfers if not t.of_weights]
    assert max(t.numel for t in found) <= hidden
    return Counter(t.kind in FORWARD for t in found if t.numel == hidden)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_whole_experts_send_no_more_than_split_ones(name: str) -> None:
    graph = cases.traced(build(name), cases.batch(padded=False))
    whole, split = tensor_parallel(graph, None, 2, ep=2), tensor_parallel(graph, None, 2)
    experts = [n for n in graph.parameters if ".experts." in n]
    assert experts
    assert all(whole.weights[n].dim == 0 for n in experts)
    assert any(split.weights[n].dim != 0 for n in experts)
    assert transfers(whole, graph) == transfers(split, graph)


@pytest.mark.parametrize("name", ["mixtral", slow("separate")])
def test_other_ranks_rows_cost_no_flops(name: str) -> None:
    graph = cases.traced(build(name), cases.batch(padded=False))
    flops = []
    for degree in (1, 2, 4):
        parallel = tensor_parallel(graph, None, degree, ep=degree)
        nodes = [n for s in graph.segments for n in parallel(s)[0].graph.nodes]
        products = [n for n in nodes if family(n.target) in GROUPED_GEMMS | SEPARATE_GEMMS]
        assert len(products) == (4 if name == "mixtral" else 2)
        flops.append(sum(work.flops for n in products for work in node_work(n, "cpu").forward))
    rows = cases.BATCH * cases.SEQUENCE * 2
    of_a_row = 2 * 2 * 3 * 32 * 64 if name == "mixtral" else 2 * 2 * 16 * 32
    assert flops == [rows * of_a_row / degree for degree in (1, 2, 4)]


def test_experts_that_cannot_be_split_are_refused() -> None:
    graph = cases.traced(Layered(6), {"x": torch.randn(12, 16)})
    with pytest.raises(ShardError) as caught:
        tensor_parallel(graph, None, 4, ep=4)
    assert str(caught.value) == (
        "ep=4 does not divide the number of experts of layers.0, which is 6; the degrees that fit "
        "are 1, 2, 3 and 6."
    )
    with pytest.raises(ShardError, match=r"which is 1; the only one that fits is 1\.$"):
        tensor_parallel(cases.traced(Layered(1), {"x": torch.randn(12, 16)}), None, 2, ep=2)
    dense = cases.traced(build_dense(), cases.batch(padded=False))
    with pytest.raises(ShardError) as caught:
        tensor_parallel(dense, None, 2, ep=2)
    assert str(caught.value) == (
        "ep=2 finds no experts to split: no stack of weights is read by grouped or batched "
        "products; use ep=1."
    )


@one_in(3)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "read_beside",
            "something else reads weights of those of layers.0.inner.experts, too; use ep=1, with "
            "tp, pp or zero=2 where memory is short.",
        ),
        (
            "mixtral",
            "the weights of model.layers.0.mlp.experts are picked anew for every token; use ep=1, "
            "or model.set_experts_implementation('grouped_mm') where the model is of transformers.",
        ),
        (
            "mixed",
            "layers.0.up becomes a part of a stack of weights that is computed of several experts' "
            "together; use ep=1, with tp, pp or zero=2 where memory is short.",
        ),
        (
            "counted",
            "layers.0.up is read by an opaque module, which keeps its weights whole; use ep=1, "
            "with pp or zero=2 where memory is short (tp leaves them whole).",
        ),
    ],
)
def test_models_without_stacks_are_told_what_fits(name: str, why: str) -> None:
    layers = {"read_beside": ReadBeside, "counted": Counted, "mixed": Mixed}
    model: Any = PlainTokens(layers[name]()) if name in layers else build(name)
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")
    graph = cases.traced(model, cases.batch(padded=False))
    sentence = f"ep=2 finds no experts to split: {why}"
    with pytest.raises(ShardError) as caught:
        tensor_parallel(graph, None, 2, ep=2)
    assert str(caught.value) == sentence
    with pytest.raises(ShardError) as caught:
        expert_parallel(graph, None, 2)
    assert str(caught.value) == sentence
    split = [
        n in tensor_parallel(graph, None, 2).weights
        for n in graph.parameters
        if "expert" in n or "layers.0.up" in n
    ]
    assert split
    assert all(split) if name in ("read_beside", "mixed") else not any(split)


def test_experts_that_are_modules_are_each_on_one_rank() -> None:
    graph = cases.traced(build("separate"), cases.batch(padded=False))
    experts = {name: int(name.split(".")[3]) for name in graph.parameters if ".experts." in name}
    for degree in (2, 4):
        expected = {name: expert // (4 // degree) for name, expert in experts.items()}
        for parallel in (
            tensor_parallel(graph, None, degree, ep=degree),
            expert_parallel(graph, None, degree),
        ):
            shards = {n: shard for s in graph.segments for n, shard in parallel(s)[1].items()}
            assert {n: s.owner for n, s in shards.items() if s.owner is not None} == expected
            local = [n for s in graph.segments for n in parallel(s)[0].graph.nodes]
            sizes = {n.meta["name"]: shape_of(n) for n in local if n.meta.get("name") in experts}
            for name, owner in expected.items():
                shape = graph.parameters[name].shape
                assert sizes[name] == (shape if owner == 0 else (0, *shape[1:]))


def test_rows_go_to_their_experts_once() -> None:
    graph = cases.traced(build("gated"), cases.batch(padded=False))
    parallel = expert_parallel(graph, None, 2)
    nodes = [n for segment in graph.segments for n in parallel(segment)[0].graph.nodes]
    assert sum(n.target is to_experts for n in nodes) == 1
    assert sum(n.target is from_experts for n in nodes) == 1


def test_places_are_multiplied_in_batches_and_drop_the_last_tokens() -> None:
    graph = cases.traced(build("mixtral"), cases.batch(padded=False))
    parallel = with_experts(graph, None, None, 1, 1.0)
    assert parallel is not None
    segments = [parallel(segment)[0] for segment in graph.segments]
    for segment in segments:
        targets = [node.target for node in segment.graph.nodes]
        products = sum(target is torch.ops.aten.bmm.default for target in targets)
        assert products == 2 * targets.count(from_places)
        assert torch.ops.aten.sort.default not in targets  # of rows of one expert, in any order
        assert not any(family(target) in GROUPED_GEMMS for target in targets)
        assert joint_obstacle(segment.graph) == ""
    assert any(from_places in (n.target for n in s.graph.nodes) for s in segments)
    assert exact(parallel) is None  # evaluations


def test_capacities_of_no_experts_and_over_tp_are_refused() -> None:
    columns = cases.batch(padded=False)
    graph = cases.traced(build("mixtral"), columns)
    parallel = tensor_parallel(graph, None, 2)
    with pytest.raises(ShardError, match=r"expert_capacity=1.5 gives .* use tp=1, or expert_cap"):
        with_experts(graph, parallel, None, 1, 1.5)
    plain = cases.traced(PlainTokens(nn.Linear(16, 16)), columns)
    with pytest.raises(ShardError, match=r"expert_capacity=1.5 finds no experts .* use expert_cap"):
        with_experts(plain, None, None, 1, 1.5)


@pytest.mark.parametrize("layer", [Separate, Dispatched])
def test_weights_that_another_segment_reads_are_refused(layer: type[nn.Module]) -> None:
    graph = cases.traced(Penalized(layer()), cases.batch(padded=False))
    first = next(name for name in graph.parameters if ".experts." in name or ".up" in name)
    refusal = rf"ep=2 gives every rank some of the experts, but \S+ reads {first} on all of them"
    with pytest.raises(ShardError, match=refusal):
        expert_parallel(graph, None, 2)
    if layer is Separate:
        with pytest.raises(ShardError, match=refusal):
            tensor_parallel(graph, None, 2, ep=2)


class EveryExpert(Stacked):
    """All experts compute all tokens, whose results a router weighs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(2, -1, 16)
        inner = torch.einsum("bsh,ehf->bsef", x, self.up).relu()
        rows = torch.einsum("bsef,efh->bseh", inner, self.down)
        return torch.einsum("bse,bseh->bsh", self.gate(x).softmax(-1), rows).flatten(0, 1)


def test_replicas_do_not_share_out_experts_that_have_all_tokens() -> None:
    """The products' first dims are samples and tokens, not experts and the rows of each."""
    graph = cases.traced(PlainTokens(EveryExpert()), cases.batch(padded=False))
    parallel = expert_parallel(graph, None, 2)
    with pytest.raises(ShardError, match="where the dim of experts is the first, and rows the sec"):
        [parallel(segment) for segment in graph.segments]


class Adapted(GroupedProducts):
    """Experts with adapters of low rank, which are added to their weights."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__(experts)
        self.left = nn.Parameter(torch.randn(experts * 2, 16) * 0.2)
        self.right = nn.Parameter(torch.randn(32, 2 * experts) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = nn.functional.one_hot(chosen, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        left = self.left.view(len(self.up), 2, 16).transpose(1, 2)
        up = torch.baddbmm(self.up, left, self.right.view(32, 2, -1).permute(2, 1, 0))
        rows = nn.functional.grouped_mm(x[order], up, offs=ends).relu()
        rows = nn.functional.grouped_mm(rows, self.down.relu(), offs=ends)
        return x.index_add(0, order, rows * weights[order, None])


class Mixed(GroupedProducts):
    """Experts whose weights are sums of shared ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = nn.functional.one_hot(chosen, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        mean = torch.eye(len(self.up)) + 0.1
        up, down = (torch.einsum("ef,fio->eio", mean, own) for own in (self.up, self.down))
        rows = nn.functional.grouped_mm(x[order], up, offs=ends).relu()
        rows = nn.functional.grouped_mm(rows, down, offs=ends)
        return x.index_add(0, order, rows * weights[order, None])


class Counted(GroupedProducts):
    """Experts whose rows are counted by an operator whose size depends on the choices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = chosen.bincount(minlength=len(self.up)).cumsum(0).to(torch.int32)
        rows = nn.functional.grouped_mm(x[order], self.up, offs=ends).relu()
        rows = nn.functional.grouped_mm(rows, self.down, offs=ends)
        return x.index_add(0, order, rows * weights[order, None])


class ReadBeside(nn.Module):
    """A layer that reads the experts' weights for something else, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Separate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found + 1e-3 * _penalty(self.inner)


class Penalized(PlainTokens):
    """Whose loss has a summand of the experts' weights."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = super().forward(input_ids, labels)["loss"]
        return {"loss": loss + 1e-3 * _penalty(self.layers[0])}


def _penalty(layer: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in layer.parameters()), torch.zeros(()))


def build_dense() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))


@pytest.mark.parametrize("product", [grouped_mm_rows, grouped_mm_fallback_rows])
@one_in(3)
@pytest.mark.parametrize("ends", [(2, 5, 7, 9), (0, 9, 9, 9), (0, 0, 0, 9)])
def test_rows_of_other_ranks_are_zero_in_both_passes(
    product: Any, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)
    for rank in range(2):
        mesh = Mesh(1, 2, 1, rank, torch.device("cpu"), None)
        monkeypatch.setattr(collectives, "current_mesh", lambda mesh=mesh: mesh)
        num_own = ends[2 * rank + 1] - (ends[2 * rank - 1] if rank else 0)
        # What other ranks' rows hold, or their gradients, must not reach anything.
        poison = torch.full((9, 16), torch.nan)
        rows = torch.where(torch.arange(9)[:, None] < num_own, torch.randn(9, 16), poison)
        rows, weight = rows.requires_grad_(), torch.randn(2, 16, 16, requires_grad=True)
        found = product(rows, weight, offsets, "tp")
        assert torch.equal(found[num_own:], torch.zeros(9 - num_own, 16))
        found.square().sum().backward()
        assert rows.grad is not None and weight.grad is not None
        assert torch.equal(rows.grad[num_own:], torch.zeros(9 - num_own, 16))
        assert weight.grad.isfinite().all()
        starts = (0, *ends)[2 * rank : 2 * rank + 2]
        has_rows = [end > start for start, end in zip(starts, ends[2 * rank :], strict=False)]
        assert [bool(own.any()) for own in weight.grad] == has_rows

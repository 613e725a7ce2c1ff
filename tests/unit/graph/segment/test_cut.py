"""Where models are cut, what crosses the cuts, and that the segments compute the model."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from merak import empty_weights
from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.segment.cut import cut_into_segments, slice_outputs
from merak.graph.trace.calls.call import Call, call_model
from merak.graph.trace.trace import trace
from tests.tiers import one_in
from tests.unit.graph import families, odd_models
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import Pipeline, assert_like_eager, built, gradients_of, metas

GOLDEN = Path(__file__).parents[3] / "golden" / "graph"

ATTENTION_PARITY = ("gpt2", "llama", "neox", "mixtral", "bert", "vit")


@one_in(3)
@pytest.mark.parametrize(
    ("family", "layers", "count"),
    [
        ("gpt2", 6, 14),
        ("llama", 6, 14),
        ("mixtral", 6, 14),
        ("neox", 6, 8),  # attention and feed-forward side by side: one segment a layer
        ("vit", 6, 14),
    ],
)
def test_cuts_fall_at_blocks(family: str, layers: int, count: int) -> None:
    with empty_weights():
        model = families.FAMILIES[family](layers)
    graph = built(model, families.batch_for(family))
    assert len(graph.segments) == count
    assert {len(crossing) for crossing in graph.boundaries()} == {1}
    per_layer = (count - 2) // layers
    for number in range(layers):
        own = graph.segments[1 + per_layer * number : 1 + per_layer * (number + 1)]
        layer = {n.split(f".{number}.")[0] for s in own for n in s.parameters if f".{number}." in n}
        assert len(layer) == 1  # every block's weights are of its own layer
        own_weights = [n for s in own for n in s.parameters if n.endswith("weight")]
        assert sum(f".{number}." in name for name in own_weights) >= len(own_weights) - 1


def test_adapters_leave_cuts_where_they_are() -> None:
    """LoRA beside every layer: twelve products in an attention block."""
    model = families.FAMILIES["llama"](2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    graph = built(adapted, families.batch_for("llama"))
    assert len(graph.segments) == 6
    assert {len(crossing) for crossing in graph.boundaries()} == {1}


def test_bert_has_a_segment_more_for_its_heads_transform() -> None:
    graph = built(families.bert(4), families.batch_for("bert"))
    assert len(graph.segments) == 2 * 4 + 3
    assert {len(crossing) for crossing in graph.boundaries()} == {1}


class _Spline(nn.Module):
    """A matrix of weights that is used elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 4) / 9)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - torch.arange(4.0)) ** 2))
        return x + (basis[..., None, :, :] * self.weight).sum((-1, -2))


class _ByValue(nn.Module):
    """What it computes depends on values: it is opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.own(x)
        return x + change if x.sum() > 0 else x - change


@pytest.mark.parametrize("block", [_Spline, _ByValue])
def test_blocks_without_products_are_segments(block: type[nn.Module]) -> None:
    model = nn.Sequential(*(block() for _ in range(5)), nn.Linear(8, 2))
    source = GraphSource(model, lambda out, _: out.pow(2).mean())
    graph = build_graph(source, metas({"input": torch.randn(2, 3, 8)}), training=True)
    assert len(graph.segments) == 6


def test_t5_is_cut_though_its_encoder_is_read_all_along() -> None:
    graph = built(families.t5(3), families.batch_for("t5"))
    assert len(graph.segments) >= 2 * 3 + 3 * 3
    assert max(len(crossing) for crossing in graph.boundaries()) <= 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@one_in(3)
@pytest.mark.parametrize("family", ATTENTION_PARITY)
def test_families_give_what_eager_gives(family: str, attention: str) -> None:
    mask = attention == "sdpa" and family != "vit"  # images have no mask
    torch.manual_seed(0)
    check(families.FAMILIES[family](2, attn_implementation=attention), family, mask, 0.0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_t5_gives_what_eager_gives(attention: str) -> None:
    """To rounding: gradients of what several segments read are summed in another order."""
    torch.manual_seed(0)
    check(families.t5(2, attn_implementation=attention), "t5", False, 1e-6)


def check(model: nn.Module, family: str, mask: bool, tolerance: float) -> None:
    batch = families.batch_for(family, mask=mask)
    eager = copy.deepcopy(model).train()
    expected = eager(**batch).loss
    expected.backward()
    loss = Pipeline(built(model, batch), model).train(batch)
    assert torch.equal(loss, expected)
    found = gradients_of(model)
    for name, known in gradients_of(eager).items():
        gradient = found[name]
        assert (gradient is None) == (known is None), name
        if known is not None and gradient is not None:
            assert (gradient - known).abs().max() <= tolerance * known.abs().max(), name


def test_a_count_of_items_is_a_column_like_others() -> None:
    torch.manual_seed(0)
    model = families.gpt2(1)
    batch = {**families.batch_for("gpt2"), "num_items_in_batch": torch.tensor(37.0)}
    expected = model(**batch).loss
    assert torch.equal(Pipeline(built(model, batch), model).train(batch), expected)
    other = batch | {"num_items_in_batch": torch.tensor(74.0)}
    assert torch.equal(Pipeline(built(model, batch), model).train(other), expected / 2)


# ---- what belongs where ----


def test_no_segment_is_empty() -> None:
    graph = built(families.gpt2(2), families.batch_for("gpt2"))
    for segment in graph.segments:
        assert any(n.op == "call_function" for n in segment.graph.nodes)


def test_boundaries_are_what_is_made_before_a_cut_and_read_after_it() -> None:
    segments = (graph := built(families.t5(2), families.batch_for("t5"))).segments
    for cut, boundary in enumerate(graph.boundaries(), start=1):
        made = [name for segment in segments[:cut] for name in segment.outputs]
        read = {name for segment in segments[cut:] for name in segment.inputs}
        assert boundary == tuple(name for name in made if name in read)


def test_masks_and_tables_are_recomputed_rather_than_sent() -> None:
    graph = built(families.llama(3), families.batch_for("llama", mask=True))
    layers = [s for s in graph.segments if "self_attn" in s.name]
    assert len(layers) == 3
    assert all(segment.batch_only for segment in layers)
    assert all(len(segment.inputs) == 1 for segment in layers)


def test_shifted_labels_are_batch_only_though_mutated() -> None:
    graph = built(odd_models.ShiftedLabels(), odd_models.tokens())
    writes = [n for n in graph.prologue.graph.nodes if str(n.target).startswith("aten.copy_")]
    assert writes
    assert all("copy_" not in str(n.target) for s in graph.segments for n in s.graph.nodes)


class WritesAtOnce(Layers):
    """Two scratch tensors of the batch, read far apart."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros_like(x)
        first[:, 0] = x[:, 1]
        second = torch.zeros(x.shape)
        second[:, 1] = 2.0
        h = self.b(torch.relu(self.a(x + first)))
        return self.c(torch.relu(h) + second).pow(2).mean()


def test_a_rank_computes_only_its_own_batch_only_values() -> None:
    graph = built(WritesAtOnce(), odd_models.rows())
    wanted = [graph.segments[0].batch_only, graph.segments[1].batch_only]
    first, last = (slice_outputs(graph.prologue, names) for names in wanted)
    assert first.columns == ("x",)
    assert last.columns == ()  # though a write of the other's is in the prologue
    assert sum("copy_" in str(n.target) or "fill_" in str(n.target) for n in last.graph.nodes) == 1


class ReadsBetweenWrites(Layers):
    """A scratch tensor of the batch alone that the main part sees between two writes."""

    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.zeros_like(x)
        scratch[:, 0] = x[:, 1]
        h = self.a(x) * scratch.clone() + self.b(x * 1.0)
        scratch[:, 0] = 5.0
        return (h + scratch).pow(2).mean() + self.c(torch.relu(h)).mean()


def test_what_is_read_between_writes_is_read_in_order() -> None:
    torch.manual_seed(0)
    model, batch = ReadsBetweenWrites(), odd_models.rows()
    expected = model(**batch)
    assert torch.equal(Pipeline(built(model, batch), model).train(batch), expected)


class Noise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + torch.randn(x.shape)
        kept = torch.bernoulli(torch.full_like(x, 0.5))
        picked = torch.multinomial(torch.ones(8), 8)
        h = torch.relu(self.b(torch.relu(self.a(x + noise))) * kept)
        h[:, 0].bernoulli_(0.5)
        return self.c(h[:, picked]).pow(2).mean()


def test_random_numbers_are_never_batch_only() -> None:
    graph = built(Noise(), odd_models.rows())
    drawn = ("rand", "bernoulli", "multinomial")
    assert not any(any(d in str(n.target) for d in drawn) for n in graph.prologue.graph.nodes)
    found = {d for s in graph.segments for n in s.graph.nodes for d in drawn if d in str(n.target)}
    assert found == set(drawn)


def test_a_buffer_that_is_written_is_read_where_it_is_written() -> None:
    graph = built(odd_models.Counter(), odd_models.rows())
    readers = {n: [s.index for s in graph.segments if n in s.buffers] for n in ("count", "mean")}
    assert all(len(found) == 1 for found in readers.values())
    assert not graph.prologue.buffers


def test_in_place_activations_do_not_join_segments() -> None:
    graph = built(odd_models.ResNet(), odd_models.images())
    assert len(graph.segments) == 5
    assert {len(crossing) for crossing in graph.boundaries()} == {1}


def test_outputs_that_no_segment_makes_leave_with_the_last() -> None:
    graph = built(odd_models.Everything(), odd_models.rows(), training=False)
    assert graph.outputs["x"] in graph.segments[-1].outputs
    assert graph.outputs["weight"] in graph.segments[-1].outputs
    assert "a.weight" in graph.segments[-1].parameters
    assert graph.outputs["doubled"] in graph.segments[-1].batch_only


def test_an_output_that_is_not_there() -> None:
    traced = trace(odd_models.Everything(), metas(odd_models.rows()))
    with pytest.raises(TraceError, match="returns no logits for the columns x; it returns loss, "):
        cut_into_segments(traced, outputs=("logits",))


def test_one_value_under_two_names() -> None:
    batch = odd_models.rows()
    model = odd_models.LossTwice().eval()
    graph = built(model, batch, training=False)
    assert len(set(graph.outputs.values())) == 1
    made = Pipeline(graph, model).evaluate(batch)
    known = call_model(model, batch, Call(("x",), {}, None, ()))
    assert made.keys() == known.keys()
    assert torch.equal(made["loss"], made["output1"])


def test_gradients_flow_where_the_meta_says() -> None:
    graph = built(odd_models.WrittenBufferOfOnes(), odd_models.rows())
    crossing = {name for names in graph.boundaries() for name in names}
    assert crossing
    assert all(graph.values[name].requires_grad for name in crossing)


class RunsTwice(nn.Module):
    """Layers that run several times, at first without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in (*self.layers, *self.layers):
                x = torch.relu(layer(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def test_weights_are_read_where_they_are_used_and_never_sent() -> None:
    torch.manual_seed(0)
    model, batch = RunsTwice(), {"x": torch.rand(4, 8)}
    graph = built(model, batch)
    assert len(graph.segments) > 3
    assert all(graph.values[name].shape[0] == 4 for names in graph.boundaries() for name in names)
    assert_like_eager(graph, model, batch, rtol=0.0, atol=0.0)


# ---- linear time ----


class Deep(nn.Module):
    """Layers that nothing but one activation joins, or ones that all read one early value too."""

    def __init__(self, layers: int, *, early: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        h = early = torch.relu(self.layers[0](x))
        for layer in self.layers[1:]:
            h = torch.relu(layer(h))
            h = h + early if self.early else h
        return h.mean()


def visits(layers: int, early: bool, patch: pytest.MonkeyPatch) -> int:
    """Reads of nodes' meta, arguments and lifetimes while a model is sharded."""
    traced = trace(Deep(layers, early=early), {"x": TensorMeta((2, 4), torch.float32)})
    count = 0
    original = torch.fx.Node.all_input_nodes.fget  # type: ignore[attr-defined]

    def counted(node: torch.fx.Node) -> list[torch.fx.Node]:
        nonlocal count
        count += 1
        return original(node)

    from merak.graph.segment.liveness import Liveness, Span

    cut = Liveness.cut

    def counted_cut(
        flow: Liveness, span: Span, carried: frozenset[int], most: int = 1
    ) -> list[Span]:
        nonlocal count
        count += span.stop - span.start
        return cut(flow, span, carried, most)

    with patch.context() as inside:
        inside.setattr(torch.fx.Node, "all_input_nodes", property(counted))
        inside.setattr(Liveness, "cut", counted_cut)
        graph = cut_into_segments(traced)
    assert len(graph.segments) >= layers - 2
    return count


@pytest.mark.parametrize("early", [False, True])
def test_cutting_is_linear_in_the_graph(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (visits(layers, early, monkeypatch) for layers in (40, 80))
    assert large < 2.1 * small


# ---- a listing, recorded ----


def listing(graph: ModelGraph) -> str:
    return "\n".join([_block(graph.prologue), *map(_block, graph.segments)]) + "\n"


def _block(segment: Segment) -> str:
    parts = ("parameters", "buffers", "columns", "inputs", "batch_only", "outputs")
    lines = [f"{segment.index} {segment.name or '(no module)'}"]
    for part in parts:
        names = getattr(segment, part)
        lines += [f"    {part}: {', '.join(names)}"] if names else []
    operators = [str(n.target) for n in segment.graph.nodes if n.op == "call_function"]
    counts = {name: operators.count(name) for name in dict.fromkeys(operators)}
    words = (f"{name} ×{count}" if count > 1 else name for name, count in counts.items())
    return "\n".join([*lines, f"    operators: {', '.join(words)}"])


def gpt2_listing() -> str:
    model = families.gpt2(2, attn_implementation="sdpa")
    columns = {n: TensorMeta((2, 8), torch.int64) for n in ("input_ids", "labels")}
    return listing(build_graph(GraphSource(model), columns, training=True))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="recorded with a newer transformers"
)
def test_gpt2_is_cut_as_recorded() -> None:
    """Record anew with `python -m tests.unit.graph.segment.test_cut`, and read the difference."""
    recorded = (GOLDEN / "gpt2_2_layers.txt").read_text(encoding="utf-8")
    assert gpt2_listing() == recorded
    assert re.findall(r"^(-?\d+) ", recorded, re.MULTILINE) == ["-1", *map(str, range(6))]


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    (GOLDEN / "gpt2_2_layers.txt").write_text(gpt2_listing(), encoding="utf-8")


class Unshared(nn.Module):
    """Products of the model's own forward, of modules that share no path, and of none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(4, 4))
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.inner) + x
        return torch.tanh(self.left(x) * self.right(x)).square().mean()


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_every_segment_has_a_name() -> None:
    graph = built(Unshared(), {"x": TensorMeta((2, 4), torch.float32)})
    assert [segment.name for segment in graph.segments] == ["inner", "left … right"]
    plain = built(NoParameters(), {"x": TensorMeta((2, 4), torch.float32)}, training=False)
    assert [segment.name for segment in plain.segments] == ["forward"]

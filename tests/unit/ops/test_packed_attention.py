"""Packed documents: their mask is recognised, and attention inside them equals masked attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.nn import functional
from torch.nn.attention import varlen

from merak.core.tensor_meta import TensorMeta, known_masks
from merak.data.signature import signature
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.operators import room_for_documents
from merak.graph.segment.build import GraphSource, build_graph
from merak.ops.attention.packed import (
    attend_packed,
    document_bounds,
    has_packed_kernel,
    packed_obstacle,
)
from merak.plan.cost.gpu_kernels import attention_kernels, attention_sentence
from merak.plan.cost.segments.measured import SegmentMemories
from tests.unit.graph import families
from tests.unit.graph.stages import metas

TOKENS = 8
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])


def mask_of(positions: torch.Tensor) -> torch.Tensor:
    documents = (positions == 0).cumsum(-1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def by_document(query: Any, key: Any, value: Any, bounds: Any, *rest: Any, **named: Any) -> Any:
    """`varlen_attn` in plain operators."""
    assert named["window_size"] == (-1, 0) and query.shape[-1] == value.shape[-1] == 8
    found = []
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        if first < last:
            parts = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
            attended = functional.scaled_dot_product_attention(
                *parts, is_causal=True, scale=named["scale"],
                enable_gqa=named.get("enable_gqa", False),
            )  # fmt: skip
            found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def packed_graph(model: torch.nn.Module, room: int) -> ModelGraph:
    ids = torch.ones_like(POSITIONS)
    columns = metas({"input_ids": ids, "labels": ids, "position_ids": POSITIONS})
    columns["position_ids"] = replace(columns["position_ids"], documents=room)
    return build_graph(GraphSource(model), columns, training=True)


def attentions(graph: ModelGraph) -> list[fx.Node]:
    targets = torch.ops.aten.scaled_dot_product_attention.default
    found = [s.graph.find_nodes(op="call_function", target=targets) for s in graph.segments]
    return [node for nodes in found for node in nodes]


def rooms(graph: ModelGraph) -> list[int]:
    return [room_for_documents(node) for node in attentions(graph)]


def heads_of_keys(graph: ModelGraph) -> list[int]:
    return [node.args[1].meta["tensor"].shape[1] for node in attentions(graph)]


def test_bounds_of_documents_fill_their_room() -> None:
    bounds = document_bounds(mask_of(POSITIONS), 6)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [0, 3, 4, 8, 16, 16, 16]


SHARED = frozenset(("window_size", "enable_gqa"))


@pytest.mark.parametrize("takes", [SHARED, SHARED - {"enable_gqa"}, None])
@pytest.mark.parametrize(
    ("heads", "features", "scale"), [(4, (8, 8), 0.3), (2, (8, 8), None), (1, (6, 3), None)]
)
def test_attention_inside_documents_equals_masked_attention(
    heads: int,
    features: tuple[int, int],
    scale: float | None,
    takes: frozenset[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's kernel has no implementation on the CPU; one in plain operators stands for it."""
    torch.manual_seed(0)
    shapes = [(4, features[0]), (heads, features[0]), (heads, features[1])]
    operands = [torch.randn(2, n, TOKENS, size).requires_grad_() for n, size in shapes]
    gradient, shares = torch.randn(2, 4, TOKENS, features[1]), {"enable_gqa": heads < 4}
    mask = mask_of(POSITIONS)
    expected = functional.scaled_dot_product_attention(*operands, mask, scale=scale, **shares)
    seen = []

    def attend(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        seen.append((key.shape[1], named.get("enable_gqa", False)))
        return by_document(query, key, value, *rest, **named)

    if takes is not None:
        monkeypatch.setattr("merak.ops.attention.packed._ARGUMENTS", takes)
        monkeypatch.setattr("merak.ops.attention.packed.has_packed_kernel", lambda *_: True)
        monkeypatch.setattr(varlen, "varlen_attn", attend)
    found = attend_packed(*operands, mask, room=16, scale=scale, **shares)
    is_shared = heads < 4 and takes == SHARED
    assert seen == ([] if takes is None else [(heads if is_shared else 4, is_shared)])
    torch.testing.assert_close(found, expected)
    pairs = [torch.autograd.grad(x, operands, gradient) for x in (found, expected)]
    for own, whole in zip(*pairs, strict=True):
        torch.testing.assert_close(own, whole)


@pytest.mark.parametrize(
    ("positions", "room"),
    [
        (POSITIONS, 16),
        (POSITIONS[1:], 0),
        (torch.zeros(4, 8, dtype=torch.long), 64),
        (POSITIONS * 2, 0),
        (POSITIONS[:, :3].float(), 0),
        (POSITIONS.flip(1), 0),
    ],
)
def test_the_host_counts_documents_by_their_positions(positions: torch.Tensor, room: int) -> None:
    batch = {"position_ids": positions}
    assert signature(batch, ends=True)["position_ids"].documents == room
    assert signature(batch)["position_ids"].documents == 0
    found = signature(batch, ends=True).columns
    assert dict(known_masks(found, ("position_ids",)))["position_ids"].documents == 0


def test_a_mask_of_documents_has_flash_attention_on_a_gpu() -> None:
    model = families.llama(2).to(torch.bfloat16)
    packed, other = packed_graph(model, 16), packed_graph(model, 0)
    assert (rooms(packed), rooms(other)) == ([16, 16], [0, 0])
    kernels = [[str(k) for s in g.segments for k in attention_kernels(s.graph)] for g in (packed,)]
    assert kernels == [["flash inside documents"] * 2]
    # They are repeated for a kernel that reads a mask.
    assert (heads_of_keys(packed), heads_of_keys(other)) == ([1, 1], [2, 2])
    said = attention_sentence((s.graph for s in other.segments), other.queried)
    assert said is not None
    assert "position_ids begin anew" in said


class SharesUnderAMask(torch.nn.Module):
    """Four heads of queries over two of keys, with a mask that is not plain causality."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        heads = self.project(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
        window = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-2)
        found = functional.scaled_dot_product_attention(*heads, window, enable_gqa=True)
        return {"loss": found.square().mean()}


def test_heads_shared_under_a_mask_are_repeated_for_a_gpu() -> None:
    """torch has no kernel for both, and multiplies matrices, which saves all scores."""
    model = SharesUnderAMask().to(torch.bfloat16)
    columns = {"x": TensorMeta((2, TOKENS, 32), torch.bfloat16)}
    (segment,) = build_graph(GraphSource(model), columns, training=True).segments
    kernels = [str(kernel) for kernel in attention_kernels(segment.graph)]
    assert kernels == ["memory-efficient, since its mask rules out flash"]
    query, key, mask = torch.empty(2, 4, 8, 8), torch.empty(2, 2, 8, 8), torch.ones(8, 8)
    seen: list[tuple[int, bool]] = []

    def attend(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        seen.append((key.shape[1], named["enable_gqa"]))
        return query

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        for device in ("cpu", "cuda"):
            attend_packed(query, key, key, mask, room=0, enable_gqa=True, device_type=device)
    assert seen == [(2, True), (4, True)]


def test_memory_is_measured_with_the_kernel_of_a_gpu() -> None:
    """It saves fewer bytes than one that reads a mask."""
    model = families.llama(1).to(torch.bfloat16)
    saved = [
        sum(SegmentMemories(torch.device("cpu"), kernels="cuda")(s).saved_bytes for s in g.segments)
        for g in (packed_graph(model, 16), packed_graph(model, 0))
    ]
    assert 0 < saved[0] < saved[1]


def test_a_mask_that_hides_more_is_read() -> None:
    config = families.SIZES
    import transformers

    model = families.causal(
        transformers.MistralConfig, transformers.MistralForCausalLM, 2,
        **config, num_key_value_heads=1, sliding_window=2,
    )  # fmt: skip
    assert rooms(packed_graph(model, 16)) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "features", "obstacle"),
    [
        (torch.bfloat16, 64, ""),
        (torch.float16, 256, ""),
        (torch.float32, 64, "float32"),
        (torch.bfloat16, 512, "heads of 512 features"),
        (torch.bfloat16, 20, ""),
    ],
)
def test_what_the_kernel_takes(dtype: torch.dtype, features: int, obstacle: str) -> None:
    operands = [TensorMeta((2, 4, 8, features), dtype) for _ in range(3)]
    assert packed_obstacle(*operands) == obstacle


def test_heads_that_it_takes() -> None:
    """Shared ones, and values of other features than keys, as DeepSeek has them."""
    query, key, value, odd = (
        TensorMeta((2, heads, 8, features), torch.bfloat16)
        for heads, features in ((4, 192), (2, 192), (2, 128), (3, 192))
    )
    assert packed_obstacle(query, key, value) == packed_obstacle(query, query, query) == ""
    assert packed_obstacle(query, odd, odd).startswith("queries of (2, 4, 8, 192) over keys")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("features", "queried", "read", "compiles"),
    [(24, 4, 4, False), (64, 4, 2, True), (128, 4, 2, False)],
)
def test_the_kernel_of_documents_on_a_gpu(
    features: int, queried: int, read: int, compiles: bool
) -> None:
    """Documents of one token, of a whole row, and across none; in bfloat16 beside float64."""
    tokens, device = 256, torch.device("cuda")
    torch.manual_seed(0)
    begins = torch.zeros(3, tokens, dtype=torch.bool)
    begins[:, 0] = True
    begins[1, [1, 130]] = begins[2, torch.randperm(tokens)[:40]] = True
    documents = begins.cumsum(-1).to(device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    mask = same & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    shapes = [(3, heads, tokens, features) for heads in (queried, read, read)]
    exact = [torch.randn(s, device=device, dtype=torch.float64).bfloat16().double() for s in shapes]
    operands = [x.bfloat16().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    gradient = torch.randn(shapes[0], device=device).bfloat16()
    whole = [exact[0], *(x.repeat_interleave(queried // read, 1) for x in exact[1:])]
    expected = functional.scaled_dot_product_attention(*whole, mask, scale=0.3)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shares = queried > read
        return attend_packed(query, key, value, mask, room=64, scale=0.3, enable_gqa=shares)

    assert has_packed_kernel(*(x.bfloat16() for x in whole), device_type="cuda")
    found = (torch.compile(attend) if compiles else attend)(*operands)
    pairs = zip(
        (found, *torch.autograd.grad(found, operands, gradient)),
        (expected, *torch.autograd.grad(expected, exact, gradient.double())),
        strict=True,
    )
    for own, right in pairs:
        assert (own.double() - right).norm() < 1e-2 * right.norm()

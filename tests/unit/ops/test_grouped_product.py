"""Grouped products: torch's kernel against groups multiplied one by one, and which is chosen."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from merak.graph.ir.operators import GROUPED_GEMMS, family
from merak.graph.segment.build import GraphSource, build_graph
from merak.ops import grouped_product as chosen
from merak.ops.grouped_product import grouped_product, has_kernel, product_by_kernel
from merak.plan.cost.segments.by_autograd import FakeRun
from tests.unit.engine.models import VOCABULARY, metas, text_batch

BF16 = torch.bfloat16


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operands(is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 16, generator=generator).to(BF16)
    weight = torch.randn(3, 24, 16, generator=generator).to(BF16)
    stack = weight.transpose(-2, -1) if is_transposed else weight.transpose(-2, -1).contiguous()
    return rows, stack, torch.tensor([4, 4, 7])  # an idle group, and rows of none


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_kernel_multiplies_as_groups_one_by_one(is_transposed: bool) -> None:
    found = []
    for product in (grouped_product, product_by_kernel):
        rows, weight, offsets = operands(is_transposed)
        for one in (rows, weight):
            one.requires_grad_().retain_grad()
        out = product(rows, weight, offsets)
        out.sum().backward()  # whose gradient has strides of zero
        found.append((out, rows.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    out, of_rows, of_weight = found[1]
    assert not out[7:].any() and not of_rows[7:].any() and not of_weight[1].any()


@pytest.mark.parametrize(
    ("device", "dtype", "width", "expected"),
    [
        ("cuda", BF16, 16, True),
        ("cuda", BF16, 20, False),  # whose rows do not begin at 16 bytes
        ("cuda", torch.float32, 16, False),
        ("cpu", BF16, 16, False),
    ],
)
def test_the_kernel_is_chosen_where_torch_has_it(
    device: str, dtype: torch.dtype, width: int, expected: bool
) -> None:
    with FakeTensorMode():
        rows = torch.empty(9, width, device=device, dtype=dtype)
        weight = torch.empty(3, 24, width, device=device, dtype=dtype).transpose(1, 2)
        offsets = torch.empty(3, device=device, dtype=torch.int64)
        assert has_kernel(rows, weight, device) is expected
        with Operators() as seen:
            assert grouped_product(rows, weight, offsets).shape == (9, 24)
    assert ("_grouped_mm" in seen.names) is expected


@pytest.mark.parametrize(("calls", "expected"), [("eager", BF16), ("grouped_mm", torch.float32)])
def test_experts_multiply_in_the_type_of_eager_code(calls: str, expected: torch.dtype) -> None:
    # A loop's linear layers are autocast; torch's grouped products are not.
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(calls)
    source = GraphSource(model, autocast=BF16)
    graph = build_graph(source, metas(text_batch()), training=True)
    experts = [s for s in graph.segments if any(map(multiplies_groups, s.graph.nodes))]
    products: list[Any] = list(filter(multiplies_groups, experts[0].graph.nodes))
    types = [product.args[1].meta["tensor"].dtype for product in products]
    assert types == [expected] * 2
    # The program of the segment chooses the kernel, whatever operator is in its graph.
    run = FakeRun(experts[0], torch.device("cpu"))
    with Operators() as seen, patch.object(chosen, "has_kernel", has_type(BF16)):
        run.backward(outputs := run.call(), run.gradients(outputs))
    assert seen.names.count("_grouped_mm") == (6 if expected is BF16 else 0)
    assert not {"_local_scalar_dense", "grouped_mm_fallback"} & {*seen.names} or expected != BF16


def multiplies_groups(node: fx.Node) -> bool:
    return family(node.target) in GROUPED_GEMMS


def has_type(dtype: torch.dtype) -> Any:
    return lambda rows, weight, device_type: rows.dtype is dtype

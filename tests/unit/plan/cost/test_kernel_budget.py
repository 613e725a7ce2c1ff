"""Kernels and bytes of one layer on a GPU: a pass that adds casts or copies changes the table.

A layer runs on fake tensors with the kernels that a GPU would choose, forward and backward, with
gradients that are added to those of an earlier microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.core.gradients import gradient_dtype, sum_in_float32
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Segment
from merak.graph.segment.build import GraphSource, build_graph
from merak.plan.cost.gpu_kernels import kernels_of
from merak.plan.cost.segments.by_autograd import FakeRun

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SAMPLES, TOKENS, WIDTH = 2, 64, 128

_PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[4] / "constraints.txt").read_text().split()
    if "==" in line
)

pytestmark = pytest.mark.skipif(
    any(version(name).split("+")[0] != _PINS[name] for name in ("torch", "transformers")),
    reason="the table is of the versions in constraints.txt",
)


class Budget(NamedTuple):
    """Kernels, those of them that only convert a type or copy, and bytes read and written."""

    kernels: int
    copies: int
    num_bytes: int


class Kernels(TorchDispatchMode):
    """Counts kernels, without views and allocations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Budget(0, 0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage()._cdata for t in given}
        mutates = func._schema.is_mutable
        written = made if mutates else [
            t for t in made if t.untyped_storage()._cdata not in storages
        ]  # fmt: skip
        if written and "empty" not in name:
            kernels, copies, num_bytes = self.found
            is_copy = name in ("_to_copy", "clone", "copy_")
            num_bytes += sum(map(_bytes, (*given, *written)))
            self.found = Budget(kernels + 1, copies + is_copy, num_bytes)
        return result


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, of which an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, use_cache=False,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=WIDTH, n_layer=2, n_head=4, n_positions=TOKENS, vocab_size=64, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def mixtral() -> Any:
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, num_local_experts=4, use_cache=False,
        )
    )  # fmt: skip
    model.set_experts_implementation("eager")  # whose linear layers autocast takes
    return model


def layer(make: Callable[[], Any], is_autocast: bool, **others: TensorMeta) -> list[Segment]:
    """Segments of a model's second layer, with autocast or with parameters in bfloat16."""
    model = make() if is_autocast else make().to(BF16)
    source = GraphSource(model, autocast=BF16 if is_autocast else None)
    column = TensorMeta((SAMPLES, TOKENS), torch.int64)
    columns = {"input_ids": column, **others, "labels": column}
    graph = build_graph(source, columns, training=True)
    own = [s for s in graph.segments if any(".1." in name for name in s.parameters)]
    assert own
    return own


def measured(segments: list[Segment]) -> list[Budget]:
    """Forward and backward of some segments."""
    forward, backward = Kernels(), Kernels()
    for segment in segments:
        run = FakeRun(segment, CPU, "cuda")
        sum_in_float32(run.parameters)
        with run.mode, torch.no_grad():
            for parameter in run.parameters:
                parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
        with run.mode, kernels_of("cuda", CPU), forward:
            outputs = run._function(*run.arguments)
        gradients = run.gradients(outputs)
        with run.mode, backward:
            kept = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(kept, gradients)
    return [forward.found, backward.found]


TABLE = {
    ("llama", "autocast"): [Budget(55, 15, 5354008), Budget(112, 23, 12853784)],
    ("llama", "bfloat16"): [Budget(46, 6, 3731224), Budget(107, 18, 10921240)],
    ("gpt2", "autocast"): [Budget(31, 11, 5784600), Budget(59, 13, 11479576)],
    ("gpt2", "bfloat16"): [Budget(20, 0, 3972376), Budget(60, 14, 10496536)],
    ("mixtral", "autocast"): [Budget(85, 19, 10669680), Budget(139, 25, 24584280)],
    ("mixtral", "bfloat16"): [Budget(77, 11, 6880112), Budget(136, 22, 22061400)],
}
"""Forward and backward, by model and precision; a change is meant, and its reason known.

Under autocast the last layer also converts what the head reads, which crosses in 16 bits.
"""


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_a_layer_runs_the_kernels_of_the_table(make: Callable[[], Any], precision: str) -> None:
    assert measured(layer(make, precision == "autocast")) == TABLE[make.__name__, precision]


@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_a_mask_of_ones_costs_nothing(make: Callable[[], Any]) -> None:
    shape = (SAMPLES, TOKENS)
    masks = [TensorMeta(shape, torch.int64, ones=ones) for ones in (True, False)]
    free, masked = (measured(layer(make, False, attention_mask=mask)) for mask in masks)
    assert free == TABLE[make.__name__, "bfloat16"]
    assert all(one.num_bytes < other.num_bytes for one, other in zip(free, masked, strict=True))

"""A model in parts that is called as it is written: tokens, outputs and draws of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.multirank.ranks import RankPool
from tests.multirank.test_zoo import SAMPLE
from tests.multirank.training import Layout
from tests.tiers import slow

ENDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **ENDS))


def mixtral() -> nn.Module:
    config = MixtralConfig(**SMALL, **HEADS, **ENDS, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=48, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, **ENDS,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=48, dropout_rate=0.0,
        decoder_start_token_id=0, **ENDS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = {f.__name__: f for f in (llama, mixtral, gpt2, t5)}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.5},
    "sampled": {"do_sample": True, "top_k": 8},
    "fixed cache": {"cache_implementation": "static"},
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(20).reshape(4, 5) * 7 % 44 + 3
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def generated(model: Any) -> Iterator[tuple[str, Any]]:
    """Tokens of each way, and what is drawn behind them; then outputs, also with autocast."""
    given = {name: value for name, value in batch().items() if name != "labels"}
    for way, options in WAYS.items():
        torch.manual_seed(3)
        tokens = model.generate(**given, max_new_tokens=6, **options)
        yield way, (tokens.tolist(), torch.rand(2).tolist())
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = model(**batch(), use_cache=False)
        yield f"cast={enabled}", (found.loss.item(), found.logits.dtype, found.logits.tolist())


def on_ranks(layout: Layout, zero: int, name: str) -> dict[str, Any]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    torch.manual_seed(0)
    model = MODELS[name]()
    merak.parallelize(
        model, batch(), num_microbatches=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        zero=zero,
    )  # fmt: skip
    with merak.callable_model(model) as whole:
        assert not whole.training and isinstance(next(whole.parameters()), nn.Parameter)
        return dict(generated(whole))


def on_layouts(layouts: list[tuple[Layout, int, str]]) -> list[dict[str, Any]]:
    from merak.core import mesh
    from merak.graph.weights import sharded

    found = []
    for layout, zero, name in layouts:
        found.append(on_ranks(layout, zero, name))
        sharded._is_layout_known.clear()
        mesh.reset()
    return found


PAIRS = [((1, 1, 2), 0, "llama"), ((1, 2, 1), 0, "gpt2"), ((2, 1, 1), 3, "llama")]
FOURS = [
    (layout, zero, name)
    for layout, zero in (((1, 2, 2), 0), ((2, 1, 2), 3))
    for name in ("mixtral", "gpt2", "t5")
]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, PAIRS), slow(4, FOURS)])
def test_results_are_those_of_one_process(
    pool: RankPool, ranks: int, layouts: list[tuple[Layout, int, str]]
) -> None:
    for seen in pool.run(on_layouts, ranks, layouts):
        for (layout, zero, name), found in zip(layouts, seen, strict=True):
            torch.manual_seed(0)
            wanted = dict(generated(MODELS[name]().eval()))
            assert found == wanted, (layout, zero, name)
            assert len({str(found[way][0]) for way in ("greedy", "sampled")}) == 2


class Counting(nn.Module):
    """Keeps what its first layer gives; its code looks at values, and at what ranks have not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []
        self.looks_at_rank = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.kept.append(h)
        y = self.second(h.tanh())
        return y.mean()

    def count(self, x: torch.Tensor, rank: int) -> tuple[int, list[Any]]:
        """How many values are above their mean, which the second layer's rank alone knows."""
        y = self.second(self.first(x))
        above = y[y > y.mean()]
        if self.looks_at_rank:
            return (int(y.sum()) if rank else bool(y.sum())), []
        names = f"{y.argmax()} {torch.as_tensor(y.max()).item()}"
        return len(above), [names, *above.sort().values.tolist()]


def look() -> tuple[Any, ...]:
    import merak
    from merak.engine.inference.placed import Placed

    merak.init(pp=2, device="cpu")
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(6, 4)
    merak.parallelize(
        model, {"x": x}, num_microbatches=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss_fn=lambda outputs, batch: outputs,
    )  # fmt: skip
    rank = merak.current_mesh().pp_rank
    with merak.callable_model(model) as whole:
        loss = whole(x)
        (kept,) = whole.kept
        assert isinstance(kept, Placed) and not isinstance(loss, Placed)
        has_values = not kept.as_subclass(torch.Tensor).is_meta
        counted = whole.count(x, rank)
        failed, diverged = "", ""
        try:
            whole.first(x).view(5, 5)
        except RuntimeError as error:
            failed = str(error)
        whole.looks_at_rank = True
        try:
            whole.count(x, rank)
        except merak.MerakError as error:
            diverged = str(error)
    assert model.kept == []  # the copy has its own
    return loss.item(), has_values, kept.holders, counted, failed, diverged


def test_values_stay_where_they_are_computed_and_code_reads_them_everywhere(pool: RankPool) -> None:
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(6, 4)
    with torch.no_grad():
        loss, counted = model(x).item(), model.count(x, 0)
    first, second = pool.run(look, 2)
    assert first[0] == second[0] == loss
    assert [first[1], second[1]] == [True, False] and first[2] == second[2] == {0}
    assert first[3] == second[3] == counted and 0 < counted[0] < 24
    assert "shape '[5, 5]' is invalid" in first[4] and first[4] == second[4]
    assert "pp rank 1 calls __int__, where this rank calls __bool__" in first[5]


def in_halves(name: str) -> list[bool]:
    """Whether outputs, and tokens, are equal where either rank has half of the parameters."""
    import merak
    from merak.check import CheckOptions, Layout
    from merak.engine.health.status import Progress
    from merak.engine.health.step_records import HostClock
    from merak.engine.inference.callable_model import call_together, copy_with
    from merak.engine.inference.calls import Calls
    from merak.engine.inference.pipeline import Pipeline
    from merak.engine.inference.placed import place
    from merak.graph.weights.holders import first_names, named_tensors
    from merak.zoo.check_by_name import small_version
    from merak.zoo.request import Request

    mesh = merak.init(pp=2, device="cpu")
    case = small_version(Request(name), Layout(pp=2), CheckOptions(steps=1)).job.case
    model: Any = case.model(0).eval()
    batch = {n: v for n, v in case.batch(0, 4).items() if n not in case.loss_columns}
    named = named_tensors(model)
    parameters = [n for n in dict.fromkeys(first_names(named).values())
                  if isinstance(named[n], nn.Parameter)]  # fmt: skip
    pipeline, placed = Pipeline(mesh, Progress(HostClock(), 0)), dict[str, torch.Tensor]()
    calls = Calls(pipeline)
    for number, one in enumerate(parameters):
        holder = int(number >= len(parameters) // 2)
        own = named[one].detach()
        own = own if holder == mesh.pp_rank else own.to("meta")
        placed[one] = place(own, calls, frozenset((holder,)), mesh.device)
    parts: Any = copy_with(model, placed)
    call_together(parts, pipeline, syncs=False)
    equal = []
    with torch.no_grad():
        first, second = (_tensors_of(m(**batch, **case.fixed)) for m in (model, parts))
    equal.append(len(first) == len(second))
    for wanted, found in zip(first, second, strict=True):
        # Values that were sent lie in memory in order, which some kernels round otherwise.
        torch.testing.assert_close(found, wanted, equal_nan=True)
    if model.can_generate() and "input_ids" in batch:
        given = {n: v for n, v in batch.items() if n in ("input_ids", "attention_mask")}
        given |= {"max_new_tokens": 4, "do_sample": False, "decoder_start_token_id": 0}
        tokens = [m.generate(**given) for m in (model, parts)]
        equal.append(torch.equal(*tokens))
    return equal


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    inner = values if isinstance(outputs, (dict, tuple, list)) else ()
    return [tensor for value in inner for tensor in _tensors_of(value)]


@pytest.mark.parametrize("name", [slow(name) for name in SAMPLE])
def test_an_architecture_in_halves(pool: RankPool, name: str) -> None:
    for equal in pool.run(in_halves, 2, name):
        assert equal and all(equal)

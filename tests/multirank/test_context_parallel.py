"""Context parallelism on real ranks: gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import merak
from merak.graph.context_parallel.apply import context_parallel, gathered_operators
from merak.graph.ir.ir import ModelGraph
from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, train_merak, train_reference
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.context_parallel.test_shifted_losses import LOSSES, Shifted
from tests.unit.graph.context_parallel.test_tokens import Reordered, WrittenScores

Gradients = dict[str, torch.Tensor]


def mixtral(attention: str) -> torch.nn.Module:
    """A mixture of experts, with the loss that balances them."""
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=cases.VOCABULARY, num_local_experts=4, use_cache=False,
        output_router_logits=True, router_aux_loss_coef=0.3, attn_implementation=attention,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5(attention: str) -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=cases.VOCABULARY,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama_of_few_heads(attention: str) -> torch.nn.Module:
    """Heads, kv-heads and samples that two ranks cannot share."""
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, vocab_size=cases.VOCABULARY, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": cases.VOCABULARY, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary scaling": ("Llama", {"rope_parameters": {**SCALED, "rope_theta": 10000.0}}),
    "sliding windows": ("Gemma3Text", {**WINDOWED, "head_dim": 8}),
    "windows of Qwen": ("Qwen2", {**WINDOWED, "use_sliding_window": True}),
    "sinks": ("GptOss", {**WINDOWED, "head_dim": 8, "num_local_experts": 4}),
    "biases by distance": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "latent attention": ("DeepseekV3", LATENT),
}
"""Kinds of attention: the model's configuration, and what is its own there."""


def published(kind: str, attention: str) -> torch.nn.Module:
    """A small version of a model with a kind of attention."""
    name, own = PUBLISHED[kind]
    values = {**COMMON, **own}
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation=attention)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def of_tokens(kind: Callable[[], torch.nn.Module], attention: str) -> torch.nn.Module:
    """A plain module that has no attention of transformers'."""
    return kind()


OTHERS = {
    "reordered": partial(of_tokens, Reordered),
    "written scores": partial(of_tokens, WrittenScores),
    "mixtral": mixtral,
    "t5": t5,
    "few heads": llama_of_few_heads,
    **{kind: partial(published, kind) for kind in PUBLISHED},
    **{kind: partial(of_tokens, partial(Shifted, kind)) for kind in LOSSES},
}

CHANGED = {
    "second of two": (True, False),
    "behind another": (True, True),
    "end of one": (False, False),
    "end of another": (False, True),
}
"""Batches whose last three tokens alone have labels: (are they a document of their own?, are the
tokens in front of them others?)."""
PACKED = {"packed": (True, False), **CHANGED}


def case(
    family: str, attention: str, dropout: float, padded: bool
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model, and its batch; "packed" has documents behind one another in a sample."""
    columns = cases.batch(padded)
    if family in OTHERS:
        torch.manual_seed(0)
        if family in ("reordered", "written scores", *LOSSES):
            columns = {"input_ids": columns["input_ids"] % 16}
        if family == "few heads":
            columns = {name: column[:1] for name, column in columns.items()}
        return OTHERS[family](attention).train(), columns
    if family in PACKED:
        is_packed, is_changed = PACKED[family]
        columns = {name: column[:1].clone() for name, column in cases.batch(False).items()}
        ends = [0, 1, 2] if is_packed else [5, 6, 7]
        columns["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, *ends]])
        columns["labels"][0, 5] = -100
        if family in CHANGED:
            columns["labels"][0, :5] = -100
            if is_changed:
                columns["input_ids"][0, :5] = (columns["input_ids"][0, :5] + 7) % cases.VOCABULARY
        return cases.build("llama", attention, dropout), columns
    return cases.build(family, attention, dropout), columns


def local_graph(graph: ModelGraph, cp: int) -> tuple[ModelGraph, str | None]:
    """The graph of a rank, and what it gathers."""
    parallel = context_parallel(graph, None, cp)
    said = gathered_operators(graph, parallel)
    fitted, parallel = parallel.fit(graph)
    return replace(fitted, segments=tuple(parallel(s)[0] for s in fitted.segments)), said


def loss_and_gradients(
    family: str, attention: str, dropout: float, cp: int, padded: bool = True
) -> tuple[float, Gradients, str | None]:
    """What one rank computes on its tokens."""
    if cp > 1:
        merak.init(cp=cp, device="cpu")
    model, columns = case(family, attention, dropout, padded)
    graph, said = cases.traced(model, columns), None
    if cp > 1:
        graph, said = local_graph(graph, cp)
    weights: dict[str, Any] = cases.local(cases.weights(model), {}, 0)
    loss = cases.run_model(graph, weights, {**cases.buffers(model, graph), **columns})
    loss.backward()
    gradients = {n: w.grad for n, w in weights.items() if w.grad is not None}
    return loss.item(), gradients, said


@pytest.mark.parametrize(
    ("family", "attention", "cp", "dropout", "padded"),
    [
        ("llama", "sdpa", 2, 0.2, True),
        slow("gpt2", "sdpa", 2, 0.2, True),
        slow("bert", "eager", 2, 0.2, True),
        slow("gpt2", "eager", 2, 0.0, False),
        slow("bert", "sdpa", 4, 0.0, True),
    ],
)
def test_ranks_equal_one_process(
    pool: RankPool, family: str, attention: str, cp: int, dropout: float, padded: bool
) -> None:
    expected_loss, expected, _ = loss_and_gradients(family, attention, dropout, 1, padded)
    ranks = pool.run(loss_and_gradients, cp, family, attention, dropout, cp, padded)
    found = {name: sum(own[name] for _, own, _ in ranks) for name in expected}
    cases.assert_gradients_equal(found, expected)
    for loss, _, said in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert said is None


@pytest.mark.parametrize(
    ("family", "attention", "padded"),
    [
        ("mixtral", "sdpa", True),
        ("packed", "sdpa", False),
        slow("few heads", "sdpa", False),
        slow("reordered", "sdpa", False),
        slow("written scores", "sdpa", False),
        ("flat", "sdpa", False),
        slow("few heads", "eager", True),
        slow("t5", "eager", True),
        *(slow(kind, "eager", True) for kind in PUBLISHED),
    ],
)
def test_other_models_equal_one_process(
    pool: RankPool, family: str, attention: str, padded: bool
) -> None:
    expected_loss, expected, _ = loss_and_gradients(family, attention, 0.0, 1, padded)
    ranks = pool.run(loss_and_gradients, 2, family, attention, 0.0, 2, padded)
    found = {name: sum(own[name] for _, own, _ in ranks) for name in expected}
    cases.assert_gradients_equal(found, expected)
    for loss, _, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_packed_documents_do_not_see_each_other(pool: RankPool) -> None:
    losses = {}
    for family in CHANGED:
        ranks = pool.run(loss_and_gradients, 2, family, "sdpa", 0.0, 2, False)
        losses[family] = ranks[0][0]
    assert losses["behind another"] == pytest.approx(losses["second of two"], rel=1e-6)
    assert losses["end of another"] != pytest.approx(losses["end of one"], rel=1e-3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Traces are shared by all jobs of the module."""
    return str(tmp_path_factory.mktemp("traces"))


# 23 batches of 4 and one of 2 in an epoch: the steps at its end have fewer microbatches.
SETUPS = [
    Setup("llama", num_samples=94, arguments={"max_grad_norm": 0.1}),
    Setup("gpt2", num_samples=94, arguments={"max_grad_norm": 0.1}),
]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        slow((2, 1, 1, 2), {}),
        slow((1, 2, 1, 2), {}),
        slow((1, 1, 2, 2), {"schedule": "zero_bubble_h1"}),
    ],
)
def test_training_equals_one_process(
    pool: RankPool, cache: str, layout: Layout, options: dict[str, Any]
) -> None:
    (expected,) = pool.run(train_reference, 1, SETUPS)
    setups = [replace(s, arguments={**s.arguments, **options}) for s in SETUPS]
    dp, tp, pp, cp = layout
    ranks = pool.run(train_merak, dp * tp * pp * cp, layout, setups, cache)
    for number, outcome in enumerate(expected):
        assert_close([rank[number] for rank in ranks], outcome)


def final_parameters(cp: int, dp: int, zeros: tuple[int, ...]) -> list[Gradients]:
    """Parameters after three steps, by stage of ZeRO."""
    own = merak.init(dp=dp, cp=cp, device="cpu")
    found = []
    for zero in zeros:
        model = cases.build("llama", "sdpa")
        example = rows(cases.batch(), own.dp_rank, dp)
        parallel = merak.parallelize(
            model,
            example,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            max_grad_norm=0.5,
            zero=zero,
        )
        for _ in range(3):
            parallel.step(example)
        with parallel.engine.whole_model():
            final = {n: p.detach().clone() for n, p in parallel.model.named_parameters()}
        found.append(final)
    return found


def rows(batch: dict[str, torch.Tensor], rank: int, number: int) -> dict[str, torch.Tensor]:
    """A replica's samples of a batch."""
    return {name: column.chunk(number)[rank] for name, column in batch.items()}


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("cp", "dp"), [(2, 1), slow(2, 2)])
def test_states_are_sharded_over_all_replicas(pool: RankPool, cp: int, dp: int) -> None:
    zeros = (0, 1, 2, 3)
    ((expected,),) = pool.run(final_parameters, 1, 1, 1, (0,))
    for found in pool.run(final_parameters, cp * dp, cp, dp, zeros):
        for own in found:
            for name, value in expected.items():
                assert torch.allclose(own[name], value, rtol=1e-5, atol=1e-6), name


def losses_of_lengths(cp: int, lengths: tuple[int, ...]) -> tuple[list[float], Gradients]:
    """Losses of steps on batches of several lengths, and the parameters behind them."""
    merak.init(cp=cp, device="cpu")
    example = cases.batch(padded=False)
    parallel = merak.parallelize(
        cases.build("llama", "sdpa"),
        example,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_grad_norm=0.5,
    )
    losses = []
    for length in lengths:
        columns = {name: column[:, :length] for name, column in example.items()}
        losses.append(float(parallel.step(columns)))
    with parallel.engine.whole_model():
        return losses, {n: p.detach().clone() for n, p in parallel.model.named_parameters()}


def test_lengths_that_the_degree_does_not_divide(pool: RankPool) -> None:
    lengths = (8, 7, 6)
    ((losses, expected),) = pool.run(losses_of_lengths, 1, 1, lengths)
    for own_losses, own in pool.run(losses_of_lengths, 2, 2, lengths):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, value in expected.items():
            assert torch.allclose(own[name], value, rtol=1e-5, atol=1e-6), name


def evaluated(cp: int, dp: int, folder: str) -> list[tuple[float, torch.Tensor]]:
    """Loss and logits of samples of unequal lengths and numbers of labels, before and after steps.

    Batches of two are as long as their longest sample; cp does not divide the lengths of some.
    """
    merak.init(cp=cp, dp=dp, device="cpu")
    args = merak.MerakArguments(
        output_dir=folder, per_device_train_batch_size=2 // dp, per_device_eval_batch_size=2,
        max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, log_level="error",
        save_strategy="no",
    )  # fmt: skip
    samples = samples_of_lengths()
    trainer = merak.MerakTrainer(
        model=cases.build("llama", "sdpa"), args=args, data_collator=padded,
        train_dataset=samples_of_lengths([8] * 8), eval_dataset=samples,
    )  # fmt: skip
    found = []
    for _ in range(2):
        loss = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(samples).predictions
        found.append((loss, torch.as_tensor(predicted)))
        trainer.train()
    return found


def samples_of_lengths(lengths: Sequence[int] = (8, 7, 5, 3, 6, 8, 4)) -> list[dict[str, Any]]:
    """Samples of some lengths, the first of whose labels do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, cases.VOCABULARY, (n,), generator=generator) for n in lengths]
    return [{"input_ids": own, "labels": [-100, *own[1:].tolist()]} for own in ids]


def padded(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sample."""
    length = max(len(sample["labels"]) for sample in samples)
    made = {"input_ids": torch.zeros(len(samples), length, dtype=torch.int64)}
    made["attention_mask"] = torch.zeros_like(made["input_ids"])
    made["labels"] = torch.full_like(made["input_ids"], -100)
    for row, sample in enumerate(samples):
        size = len(sample["labels"])
        made["input_ids"][row, :size] = torch.as_tensor(sample["input_ids"])
        made["labels"][row, :size] = torch.as_tensor(sample["labels"])
        made["attention_mask"][row, :size] = 1
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "dp"), [(2, 1), (2, 2)])
def test_evaluation_of_unequal_lengths(pool: RankPool, tmp_path: Path, cp: int, dp: int) -> None:
    (expected,) = pool.run(evaluated, 1, 1, 1, str(tmp_path))
    for found in pool.run(evaluated, cp * dp, cp, dp, str(tmp_path)):
        for (loss, logits), (own_loss, own_logits) in zip(expected, found, strict=True):
            assert own_loss == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-5)

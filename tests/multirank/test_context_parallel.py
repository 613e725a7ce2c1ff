"""Context parallelism on real ranks: gradients are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import merak
from merak.ops.attention.ring import Ring, attend_ring
from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, train_merak, train_reference
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases

Gradients = dict[str, torch.Tensor]


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


def around_a_ring() -> list[torch.Tensor]:
    """A rank's part of attention over a ring, and of its gradients."""
    rank = merak.init(cp=2, device="cpu").cp_rank
    operands = [x[:, :, 4 * rank :][:, :, :4].requires_grad_() for x in operands_of_a_ring()]
    found = attend_ring(*operands, None, *Ring(None, True, 2, "cp"))
    return [found.detach(), *torch.autograd.grad(found.square().sum(), operands)]


def operands_of_a_ring() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 8, 8, generator=generator) for _ in range(3)]


@pytest.mark.nccl_rules
def test_a_ring_of_ranks_is_one_process(pool: RankPool) -> None:
    whole = [x.requires_grad_() for x in operands_of_a_ring()]
    found = functional.scaled_dot_product_attention(*whole, is_causal=True)
    expected = [found.detach(), *torch.autograd.grad(found.square().sum(), whole)]
    for parts, right in zip(zip(*pool.run(around_a_ring, 2)), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right)


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

"""evaluate, predict and metrics on many ranks: those of one process, at every moment."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    SEQUENCE,
    VOCABULARY,
    Layout,
    Setup,
    Texts,
    alone,
    make_merak,
    make_reference,
)
from tests.tiers import slow

SETUPS = [
    Setup(
        family,
        num_samples=32,
        arguments={
            "max_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": 4,
            "include_for_metrics": ["inputs"],
        },
    )
    for family in ("gpt2", "bert", "plain")
]

Seen = dict[str, Any]


def metrics_of(result: EvalPrediction) -> dict[str, float]:
    logits = result.predictions
    assert isinstance(logits, np.ndarray)
    labels = np.asarray(result.label_ids)
    return {
        "accuracy": float((logits.argmax(-1) == labels).mean()),
        "sum": float(logits.sum()),
        "inputs": float(np.asarray(result.inputs).sum()),
    }


def watch(trainer: Any) -> Seen:
    """Evaluate before, in and after training, and predict."""
    seen: Seen = {"before": _numbers(trainer.evaluate())}
    trainer.train()
    history = [_numbers(log) for log in trainer.state.log_history if "eval_loss" in log]
    seen["between"] = history
    seen["after"] = _numbers(trainer.evaluate(metric_key_prefix="test"))
    seen["other"] = _numbers(trainer.evaluate(_texts(trainer, 3, seed=9)))
    predicted = trainer.predict(_texts(trainer, 7, seed=8))
    seen["predictions"] = predicted.predictions
    seen["labels"] = predicted.label_ids
    return seen


def _texts(trainer: Any, size: int, seed: int) -> Texts:
    return Texts(size, seed=seed, padded=trainer.train_dataset.padded)


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    timed = ("runtime", "per_second", "preparation_time", "epoch", "step")
    return {k: v for k, v in metrics.items() if not k.endswith(timed)}


def _evaluation(setup: Setup) -> dict[str, Any]:
    padded = setup.family != "plain"
    return {"compute_metrics": metrics_of, "eval_dataset": Texts(10, seed=7, padded=padded)}


def evaluate_merak(layout: Layout, cache: str) -> list[Seen]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    return [watch(make_merak(setup, dp, cache, **_evaluation(setup))) for setup in SETUPS]


def evaluate_alone() -> list[Seen]:
    found = []
    for setup in SETUPS:
        with alone():
            found.append(watch(make_reference(setup, **_evaluation(setup))))
    return found


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> list[Seen]:
    (found,) = pool.run(evaluate_alone, 1)
    return list(found)


@pytest.mark.parametrize("layout", [slow((2, 1, 2)), slow((1, 2, 2))])
def test_evaluation_equals_one_process(
    pool: RankPool, expected: list[Seen], layout: Layout, tmp_path_factory: Any
) -> None:
    dp, tp, pp = layout
    cache = str(tmp_path_factory.getbasetemp() / "evaluation-traces")
    ranks = pool.run(evaluate_merak, dp * tp * pp, layout, cache)
    for rank in ranks:
        for seen, wanted in zip(rank, expected, strict=True):
            _assert_same(seen, wanted, exactly=dp * tp == 1)


def _assert_same(seen: Seen, wanted: Seen, exactly: bool) -> None:
    tolerance = 0.0 if exactly else 2e-5
    assert np.array_equal(seen["labels"], wanted["labels"])
    assert seen["predictions"].shape == wanted["predictions"].shape
    largest = float(np.abs(wanted["predictions"]).max())
    error = np.abs(seen["predictions"] - wanted["predictions"]).max()
    assert error <= tolerance * largest
    moments = [(seen[m], wanted[m]) for m in ("before", "after", "other")]
    moments += list(zip(seen["between"], wanted["between"], strict=True))
    assert len(moments) == 5
    for found, known in moments:
        assert found.keys() == known.keys()
        for name, value in known.items():
            if name.endswith("sum"):  # of terms that cancel
                count = VOCABULARY * SEQUENCE * 10
                assert found[name] == pytest.approx(value, abs=tolerance * count * largest)
            else:
                assert found[name] == pytest.approx(value, rel=tolerance)


def whole_logits() -> int:
    """How many batches of logits this process holds."""
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    shaped = [one for one in held if one.dim() == 3 and one.shape[-1] == VOCABULARY]
    return len({one.untyped_storage().data_ptr() for one in shaped if not one.is_meta})


def count_logits(layout: Layout, options: Seen, cache: str) -> Seen:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    counted: list[int] = []

    def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted.append(whole_logits())
        return logits.argmax(-1)

    setup = replace(SETUPS[0], arguments=SETUPS[0].arguments | {"eval_strategy": "no"} | options)
    trainer = make_merak(
        setup,
        dp,
        cache,
        eval_dataset=Texts(36, seed=7),
        compute_metrics=lambda result: {"sum": float(result.predictions.sum())},
        preprocess_logits_for_metrics=argmax,
    )
    return {"evaluated": _numbers(trainer.evaluate()), "counted": counted}


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    "layout,options",
    [
        ((1, 1, 2), {}),
        slow((1, 2, 1), {}),
        slow((2, 1, 1), {"zero": 3}),
        slow((2, 1, 2), {}),
        slow((1, 1, 2), {"schedule": "interleaved_1f1b", "schedule_options": {"chunks": 2}}),
    ],
)
def test_whole_logits_are_those_of_one_batch(
    pool: RankPool, cache: str, layout: Layout, options: Seen
) -> None:
    dp, tp, pp = layout
    ranks = pool.run(count_logits, dp * tp * pp, layout, options, cache)
    with alone():
        reference = make_reference(
            replace(SETUPS[0], arguments=SETUPS[0].arguments | {"eval_strategy": "no"}),
            eval_dataset=Texts(36, seed=7),
            compute_metrics=lambda result: {"sum": float(result.predictions.sum())},
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        expected = _numbers(reference.evaluate())
    for rank in ranks:
        assert rank["evaluated"] == pytest.approx(expected, rel=1e-4)
        assert len(rank["counted"]) == 9
        assert max(rank["counted"]) <= dp  # those of a round, one of each replica

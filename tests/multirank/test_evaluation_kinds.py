"""evaluate and predict for many kinds of models and lengths: those of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import EvalPrediction, Trainer, TrainingArguments

from tests.multirank.evaluated import KINDS, Collate, Kind, Stream, samples
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, alone
from tests.shared_cache import FOLDER
from tests.tiers import slow

TOLERANCE = 2e-5

LAYOUTS: Mapping[Layout, tuple[str, ...]] = {
    (1, 1, 2): ("experts", "masked", "choices", "bare", "nested", "first", "unmeant"),
    (1, 2, 1): ("causal", "answers", "outlines", "states"),
    (2, 1, 1): ("batchwise", "number", "pictures", "named", "pairs"),
    (1, 2, 2): ("summarised", "whisper", "speech", "sentences", "shown"),
}
"""What is evaluated in which layout: each kind in one of them at least, for the sake of time."""

Seen = dict[str, Any]


def metrics_of(result: EvalPrediction) -> dict[str, float]:
    """Numbers that differ wherever anything that a metric is given differs."""
    given = {
        "predictions": result.predictions,
        "labels": result.label_ids,
        "inputs": result.inputs,
        "losses": result.losses,
    }
    found = {name: _flat(value) for name, value in given.items() if value is not None}
    sizes = {name: _size(parts) for name, parts in found.items()}
    return sizes | {f"num_{name}": float(len(parts)) for name, parts in found.items()}


def _size(parts: Sequence[np.ndarray]) -> float:
    return sum(float(np.abs(part[part != -100]).sum(dtype=np.float64)) for part in parts)


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in _flat(each)]
    return [np.asarray(value)]


def watch(trainer: Trainer, kind: Kind) -> Seen:
    """Evaluate before, in and after training, and predict."""
    ignored = None if kind.ignored is None else list(kind.ignored)
    seen: Seen = {"metrics": [_numbers(trainer.evaluate(ignore_keys=ignored))]}
    trainer.train(ignore_keys_for_eval=ignored)
    seen["metrics"] += [_numbers(log) for log in trainer.state.log_history if "eval_runtime" in log]
    seen["metrics"].append(_numbers(trainer.evaluate(ignore_keys=ignored)))
    predicted = trainer.predict(
        samples(kind, kind.predicted, 8, kind.unlabelled),
        ignore_keys=ignored,
    )
    return seen | {"predictions": predicted.predictions, "labels": predicted.label_ids}


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    timed = ("runtime", "per_second", "preparation_time", "epoch", "step")
    return {k: v for k, v in metrics.items() if not k.endswith(timed)}


def _arguments(kind: Kind) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.0, "optim": "sgd", "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "log_level": "error",
        "seed": 11, **kind.arguments,
    }  # fmt: skip


def _given(kind: Kind) -> dict[str, Any]:
    torch.manual_seed(5)
    evaluated = samples(kind, 10, 7)
    return {
        "model": kind.model(), "train_dataset": samples(kind, 16, 0),
        "eval_dataset": Stream(evaluated.rows) if kind.streamed else evaluated,
        "data_collator": Collate(kind.plain), "compute_metrics": metrics_of, **kind.given,
    }  # fmt: skip


def evaluate_merak(names: Sequence[str], layout: Layout, cache: str) -> dict[str, Seen]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = {}
    for name in names:
        kind = KINDS[name]
        microbatches = {"gradient_accumulation_steps": 2 // dp}
        args = merak.MerakArguments(trace_cache=cache, **_arguments(kind), **microbatches)
        found[name] = watch(_quiet(merak.MerakTrainer(args=args, **_given(kind))), kind)
    return found


def evaluate_alone(names: Sequence[str]) -> dict[str, Seen]:
    found = {}
    for name in names:
        kind = KINDS[name]
        with alone():
            args = TrainingArguments(**_arguments(kind), gradient_accumulation_steps=2)
            found[name] = watch(_quiet(Trainer(args=args, **_given(kind))), kind)
    return found


def predict_merak(names: Sequence[str], layout: Layout, cache: str) -> dict[str, Seen]:
    """Predict samples without labels, with no others at hand."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = {}
    for name in names:
        args = merak.MerakArguments(trace_cache=cache, **_only_predicting(KINDS[name]))
        trainer = merak.MerakTrainer(args=args, model=_given(KINDS[name])["model"])
        found[name] = _prediction(trainer, KINDS[name])
    return found


def predict_alone(names: Sequence[str]) -> dict[str, Seen]:
    found = {}
    for name in names:
        with alone():
            args = TrainingArguments(**_only_predicting(KINDS[name]))
            trainer = Trainer(args=args, model=_given(KINDS[name])["model"])
            found[name] = _prediction(trainer, KINDS[name])
    return found


def _only_predicting(kind: Kind) -> dict[str, Any]:
    return {**_arguments(kind), "eval_strategy": "no"}


def _prediction(trainer: Trainer, kind: Kind) -> Seen:
    trainer.data_collator = Collate(kind.plain)
    predicted = _quiet(trainer).predict(samples(kind, 10, 8, kind.unlabelled))  # type: ignore[arg-type]
    return {"predictions": predicted.predictions, "labels": predicted.label_ids}


def _quiet(trainer: Trainer) -> Trainer:
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ((1, 1, 2), ("masked", "nested")),
        *(slow(layout, kinds) for layout, kinds in LAYOUTS.items()),
    ],
)
def test_evaluation_of_all_kinds_equals_one_process(
    pool: RankPool, layout: Layout, kinds: tuple[str, ...]
) -> None:
    (expected,) = pool.run(evaluate_alone, 1, kinds)
    dp, tp, pp = layout
    ranks = pool.run(evaluate_merak, dp * tp * pp, kinds, layout, str(FOLDER))
    for rank in ranks:
        assert tuple(rank) == kinds
        for name, seen in rank.items():
            _assert_same(name, seen, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 2)])
def test_samples_without_labels_are_predicted_without_training(
    pool: RankPool, layout: Layout
) -> None:
    names = ("nested", "sentences")
    (expected,) = pool.run(predict_alone, 1, names)
    dp, tp, pp = layout
    for rank in pool.run(predict_merak, dp * tp * pp, names, layout, str(FOLDER)):
        for name in names:
            assert rank[name]["labels"] is expected[name]["labels"] is None
            found, known = rank[name]["predictions"], expected[name]["predictions"]
            _assert_close(name, found, known, TOLERANCE)


def test_every_kind_is_evaluated() -> None:
    assert {name for names in LAYOUTS.values() for name in names} == set(KINDS)


def _assert_same(name: str, seen: Seen, wanted: Seen) -> None:
    assert len(seen["metrics"]) == len(wanted["metrics"]) == 4, name
    for found, known in zip(seen["metrics"], wanted["metrics"], strict=True):
        assert found == pytest.approx(known, rel=TOLERANCE), name
    _assert_close(f"labels of {name}", seen["labels"], wanted["labels"], 0.0)
    _assert_close(f"predictions of {name}", seen["predictions"], wanted["predictions"], TOLERANCE)


def _assert_close(name: str, found: Any, known: Any, tolerance: float) -> None:
    """The same numbers in the same tuples, lists and dicts."""
    if isinstance(known, Mapping):
        assert list(found) == list(known), name
        found, known = tuple(found.values()), tuple(known.values())
    assert type(found) is type(known), name
    if isinstance(known, (tuple, list)):
        assert len(found) == len(known), name
        for number, (mine, right) in enumerate(zip(found, known, strict=True)):
            _assert_close(f"{name}[{number}]", mine, right, tolerance)
        return
    if known is None:
        return
    assert found.shape == known.shape and found.dtype == known.dtype, name
    largest = np.abs(known).max(initial=0.0)
    assert np.abs(found - known).max(initial=0.0) <= tolerance * largest, name

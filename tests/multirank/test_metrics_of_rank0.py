"""Metrics that rank 0 alone computes decide on every rank what becomes of the training."""

from __future__ import annotations

import os
from typing import Any

from transformers import EarlyStoppingCallback

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, Texts, make_merak


def is_rank0() -> bool:
    return os.environ["RANK"] == "0"


def worse(trainer: Any) -> dict[str, float]:
    return {"eval_exact": 1.0 / (1 + trainer.state.global_step)}


class Answers(merak.MerakTrainer):
    """Computes metrics where it saves, and logs them where it logs, as transformers' run_qa."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        loader = self.get_eval_dataloader()
        output = self.evaluation_loop(loader, "Evaluation", None, metric_key_prefix="eval")
        metrics: dict[str, float] = dict(output.metrics or {})
        if self.args.should_save:
            metrics |= worse(self)
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


class OnlyOnRank0(merak.MerakTrainer):
    """Gives metrics on rank 0, and nothing elsewhere."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super().evaluate(*args, **kwargs)
        return metrics | worse(self) if is_rank0() else None


KINDS = ["answers", "evaluate", "compute_metrics"]


def train(kinds: list[str], folder: str, cache: str) -> list[Any]:
    merak.init(pp=2, device="cpu")
    found = []
    trainers: dict[str, Any] = {}

    def metrics(_: Any) -> Any:
        return {"exact": worse(trainers["compute_metrics"])["eval_exact"]} if is_rank0() else None

    for kind in kinds:
        cls = {"answers": Answers, "evaluate": OnlyOnRank0}.get(kind, merak.MerakTrainer)
        arguments = {
            "output_dir": f"{folder}/{kind}", "max_steps": 8, "eval_strategy": "steps",
            "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1,
            "load_best_model_at_end": True, "metric_for_best_model": "exact",
            "greater_is_better": True, "per_device_eval_batch_size": 4,
        }  # fmt: skip

        made = make_merak(
            Setup("gpt2", num_samples=16, padded=False, arguments=arguments),
            1,
            cache,
            trainer_class=cls,
            eval_dataset=Texts(4, padded=False),
            callbacks=[EarlyStoppingCallback(2)] if kind != "evaluate" else [],
            compute_metrics=metrics if kind == "compute_metrics" else None,
        )
        trainers[kind] = made
        made.train()
        state = made.state
        found.append((state.global_step, state.best_global_step, state.best_metric))
    return found


def test_all_ranks_go_on_with_them(pool: RankPool, tmp_path: Any, cache: str) -> None:
    for answers, evaluated, computed in pool.run(train, 2, KINDS, str(tmp_path), cache):
        assert answers == computed == (3, 1, 0.5)
        assert evaluated == (8, 1, 0.5)

"""Arguments and parts of transformers.Trainer keep their meaning on many ranks."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from tests.multirank.compare import assert_close, assert_same_losses_everywhere, whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    Layout,
    Outcome,
    Setup,
    Texts,
    Watch,
    alone,
    loss_of_logits,
    make_merak,
    make_reference,
    model_of,
)
from tests.tiers import slow

SHORT = {"max_steps": 4, "learning_rate": 1e-3}


def _setup(**arguments: Any) -> Setup:
    return Setup("bert", num_samples=30, arguments={**SHORT, **arguments})


CASES: dict[str, Setup] = {
    "sgd": _setup(optim="sgd", optim_args="momentum=0.9"),
    "rmsprop": _setup(optim="rmsprop"),
    "adagrad": _setup(optim="adagrad"),
    "weight_decay": _setup(weight_decay=0.1, adam_beta2=0.95),
    "cosine": _setup(lr_scheduler_type="cosine", warmup_steps=2),
    "epochs": _setup(max_steps=-1, num_train_epochs=3),
    "sequential": _setup(train_sampling_strategy="sequential"),
    "drop_last": _setup(dataloader_drop_last=True, max_steps=6),
    "data_seed": _setup(data_seed=3, max_steps=6),
    "logging": _setup(logging_steps=2, logging_first_step=True),
}
WHOLE_PARAMETERS: dict[str, Setup] = {
    "adafactor": _setup(optim="adafactor"),
}
WORKERS: dict[str, Setup] = {
    "workers": _setup(dataloader_num_workers=1, max_steps=2),
}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Texts one after another; no length."""

    def __init__(self, size: int) -> None:
        self.texts = Texts(size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.texts[i] for i in range(len(self.texts)))


def run_merak(layout: Layout, setups: list[Setup], kind: str, cache: str) -> list[Outcome]:
    """Train jobs of some kind on this rank."""
    import merak

    _let_loaders_have_workers()

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    outcomes = []
    for setup in setups:
        outcome = Outcome(place=(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank))
        trainer = make_merak(setup, dp, cache, **_extras(setup, kind))
        trainer.add_callback(Watch(outcome, lambda made=trainer: dict(made.engine.parameters)))
        trainer.train()
        outcome.final = {n: p.detach().clone() for n, p in trainer.engine.parameters.items()}
        outcome.shards = dict(trainer.engine.shards)
        outcomes.append(outcome)
    return outcomes


def run_alone(setups: list[Setup], kind: str) -> list[Outcome]:
    _let_loaders_have_workers()
    outcomes = []
    for setup in setups:
        outcome = Outcome()
        with alone():
            trainer = make_reference(setup, **_extras(setup, kind))
            assert isinstance(trainer.model, torch.nn.Module)
            found = dict(trainer.model.named_parameters())
            trainer.add_callback(Watch(outcome, lambda found=found: found))
            trainer.train()
        outcome.final = {name: p.detach().clone() for name, p in found.items()}
        outcomes.append(outcome)
    return outcomes


def _let_loaders_have_workers() -> None:
    """The pool's processes are daemons, which Python does not let have children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _extras(setup: Setup, kind: str) -> dict[str, Any]:
    if kind == "stream":
        return {"train_dataset": Stream(setup.num_samples)}
    if kind == "model_init":
        return {"model_init": lambda: model_of(setup)}
    if kind == "lengths":
        texts = [{k: v.tolist() for k, v in sample.items()} for sample in _samples(setup)]
        import datasets  # type: ignore[import-untyped]

        dataset = datasets.Dataset.from_list(texts)
        lengths = [sum(text["attention_mask"]) for text in texts]
        return {"train_dataset": dataset.add_column("length", lengths)}
    return {}


def _samples(setup: Setup) -> list[dict[str, torch.Tensor]]:
    texts = Texts(setup.num_samples)
    return [texts[i] for i in range(len(texts))]


def _check(pool: RankPool, layout: Layout, cases: dict[str, Setup], kind: str, cache: str) -> None:
    (expected,) = pool.run(run_alone, 1, list(cases.values()), kind)
    dp, tp, pp = layout
    ranks = pool.run(run_merak, dp * tp * pp, layout, list(cases.values()), kind, cache)
    for number, (case, wanted) in enumerate(zip(cases, expected, strict=True)):
        own = [rank[number] for rank in ranks]
        assert_same_losses_everywhere(own)
        final = whole(own, "final")
        if dp * tp == 1:
            assert own[0].losses == wanted.losses, case
            for name, value in wanted.final.items():
                assert torch.equal(final[name], value), (case, name)
        else:
            assert own[0].losses == pytest.approx(wanted.losses, rel=1e-5), case


@pytest.mark.slow
def test_arguments_through_a_pipeline(pool: RankPool, cache: str) -> None:
    cases = {**CASES, **WHOLE_PARAMETERS, **WORKERS}
    _check(pool, (1, 1, 2), cases, "plain", cache)


@pytest.mark.slow
def test_arguments_with_replicas_and_shards(pool: RankPool, cache: str) -> None:
    _check(pool, (2, 2, 1), CASES, "plain", cache)


@pytest.mark.slow
def test_whole_parameters_with_replicas(pool: RankPool, cache: str) -> None:
    _check(pool, (2, 1, 1), {**WHOLE_PARAMETERS, **WORKERS}, "plain", cache)


@pytest.mark.slow
def test_whole_parameters_of_shards(pool: RankPool, cache: str) -> None:
    _check(pool, (1, 2, 1), WHOLE_PARAMETERS, "plain", cache)


@pytest.mark.parametrize("layout", [slow((1, 1, 2)), slow((2, 1, 2))])
def test_streams(pool: RankPool, cache: str, layout: Layout) -> None:
    # 30 samples: the stream ends in the middle of a step, and begins again.
    _check(pool, layout, {"stream": _setup(max_steps=5)}, "stream", cache)


def train_what_is_left_over(layout: Layout, options: dict[str, Any]) -> list[tuple[float, float]]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    return _logged(make_merak(_setup(**options), dp, "", train_dataset=Stream(21)))


def what_is_left_over_alone() -> list[tuple[float, float]]:
    with alone():
        return _logged(make_reference(_setup(), train_dataset=Stream(21)))


def _logged(trainer: transformers.Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    "layout,options",
    [
        ((1, 1, 2), {}),
        slow((2, 1, 1), {"zero": 3}),
    ],
)
def test_what_an_epoch_leaves_over_is_stepped_with_the_next(
    pool: RankPool, layout: Layout, options: dict[str, Any]
) -> None:
    # 21 samples are 6 microbatches: one step of 4, and 2 whose gradients wait for the next epoch.
    (expected,) = pool.run(what_is_left_over_alone, 1)
    assert expected[1][0] > 1.3 * expected[0][0], "nothing is left over"
    dp, tp, pp = layout
    for found in pool.run(train_what_is_left_over, dp * tp * pp, layout, options):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("layout", [slow((2, 1, 2))])
def test_grouping_by_length(pool: RankPool, cache: str, layout: Layout) -> None:
    # This sampler draws from the global generator: one process's order holds for the first epoch.
    setup = _setup(max_steps=2, train_sampling_strategy="group_by_length")
    _check(pool, layout, {"lengths": setup}, "lengths", cache)


@pytest.mark.slow
def test_layouts_agree_on_later_epochs_and_on_models_they_make(pool: RankPool, cache: str) -> None:
    grouped = _setup(max_steps=5, train_sampling_strategy="group_by_length")
    for kind, setup in (("lengths", grouped), ("model_init", _setup())):
        ((one,),) = pool.run(run_merak, 1, (1, 1, 1), [setup], kind, cache)
        for layout in ((1, 1, 2), (2, 1, 2)):
            ranks = pool.run(run_merak, layout[0] * layout[2], layout, [setup], kind, cache)
            assert_close([rank[0] for rank in ranks], one)


def train_apart(layout: Layout) -> list[float]:
    """One step in which every replica divides by its own label tokens."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    return _losses(make_merak(_apart(), dp, ""))


def _apart() -> Setup:
    own = {"average_tokens_across_devices": False, "train_sampling_strategy": "sequential"}
    return Setup("plain", num_samples=30, arguments={**SHORT, **own, "max_steps": 1})


@pytest.mark.slow
def test_replicas_may_average_over_their_own_tokens(pool: RankPool) -> None:
    texts = Texts(30, padded=False)
    model = model_of(_apart())
    expected = 0.0
    for replica in range(2):
        starts = [4 * (2 * number + replica) for number in range(2)]
        batches = [default_data_collator([texts[i] for i in range(s, s + 4)]) for s in starts]
        count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        for batch in batches:
            loss = loss_of_logits(model(batch["input_ids"]), batch["labels"], count)
            expected += loss.item() / 2
    for found in pool.run(train_apart, 2, (2, 1, 1)):
        assert found == pytest.approx([expected], rel=1e-5)


def log_to_tensorboard(folder: str) -> list[str]:
    import merak

    merak.init(pp=2, device="cpu")
    arguments = {**SHORT, "report_to": ["tensorboard"]}
    seen: list[str] = []

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step}")
            control.should_training_stop = state.global_step == 3

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("end")

    trainer = make_merak(Setup("bert", arguments=arguments), 1, "", callbacks=[Steps()])
    trainer.args.output_dir = folder
    trainer.train()
    return seen


def test_callbacks_run_everywhere_and_tensorboard_once(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    for seen in pool.run(log_to_tensorboard, 2, str(tmp_path)):
        assert seen == ["step 1", "step 2", "step 3", "end"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0]))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    [text] = events.Tensors("args/text_summary")[0].tensor_proto.string_val
    config = json.loads(text)
    layout = {key: value for key, value in config.items() if key.startswith("layout/")}
    assert layout.items() >= {"layout/dp": 1, "layout/pp": 2, "layout/schedule": "1f1b"}.items()
    assert layout["layout/ranks"] == layout["layout/stages"] == 2
    assert layout["layout/parameters"] > 1000 and layout["layout/microbatch"] == "4 × 12"


def train_with_own_loss(layout: Layout) -> tuple[list[float], float]:
    """A loss function that knows no label column: transformers sums it over microbatches."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    setup = Setup("bert", num_microbatches=2 * dp, arguments={**SHORT, "label_names": []})
    trainer = make_merak(setup, dp, "", compute_loss_func=own_loss, train_dataset=Unlabelled())
    return _losses(trainer), 0.0


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"]
    return logits.square().mean()


class Unlabelled(Texts):
    def __init__(self) -> None:
        super().__init__(32)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {name: sample[name] for name in ("input_ids", "attention_mask")}


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train_alone_with_own_loss() -> list[float]:
    setup = Setup("bert", num_microbatches=2, arguments={**SHORT, "label_names": []})
    with alone():
        return _losses(
            make_reference(setup, compute_loss_func=own_loss, train_dataset=Unlabelled())
        )


@pytest.mark.slow
def test_a_loss_function_without_labels(pool: RankPool) -> None:
    (expected,) = pool.run(train_alone_with_own_loss, 1)
    for found, _ in pool.run(train_with_own_loss, 2, (1, 1, 2)):
        assert found == expected

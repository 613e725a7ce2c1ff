"""Dynamic rotary embeddings: batches of one length train as in one process; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import merak
from merak.core.errors import TraceError
from tests.multirank.ranks import RankPool
from tests.tiers import slow

ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
OWN_LENGTH, LONG = 8, 12


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=32, num_hidden_layers=2, max_position_embeddings=OWN_LENGTH,
        rope_parameters=ROPE, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(lengths: list[int], count: int = 2) -> list[dict[str, list[int]]]:
    """Samples of each length: so many."""
    return [
        {name: [(7 * number + k) % 32 for k in range(length)] for name in ("input_ids", "labels")}
        for length in lengths
        for number in range(count)
    ]


def arguments(cls: Any, folder: Path, steps: int, **more: Any) -> Any:
    return cls(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, logging_steps=1, report_to="none", disable_tqdm=True,
        per_device_eval_batch_size=1, use_cpu=True, optim="sgd", learning_rate=0.5,
        train_sampling_strategy="sequential", **more,
    )  # fmt: skip


def losses(trainer: transformers.Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train(
    lengths: list[int], folder: Path, save: str, dp: int = 1, evaluated: tuple[int, ...] = ()
) -> tuple[list[float], str]:
    """Losses, and the refusal of a batch."""
    merak.init(dp=dp, pp=2 // dp, device="cpu")
    kinds = {"eval_strategy": "steps", "eval_steps": 2} if evaluated else {}
    num_steps = len(lengths) // dp**2
    args = arguments(merak.MerakArguments, folder, num_steps, save_strategy=save, **kinds)
    data = rows(lengths, 2 // dp)
    held = rows(list(evaluated)) if evaluated else None
    trainer = merak.MerakTrainer(llama(), args, train_dataset=data, eval_dataset=held)
    said = ""
    try:
        trainer.train()
    except TraceError as error:
        said = str(error)
    return losses(trainer), said


@pytest.mark.parametrize("lengths", [slow([LONG] * 3), slow([OWN_LENGTH, LONG, OWN_LENGTH, LONG])])
def test_long_batches_train_as_in_one_process(
    lengths: list[int], pool: RankPool, tmp_path: Path
) -> None:
    steps = len(lengths)
    args = arguments(transformers.TrainingArguments, tmp_path, steps, save_strategy="no")
    alone = transformers.Trainer(llama(), args, train_dataset=rows(lengths))
    alone.train()
    for found, said in pool.run(train, 2, lengths, tmp_path, "no"):
        assert found == pytest.approx(losses(alone), rel=1e-5) and not said


@pytest.mark.parametrize(
    ("save", "lengths", "left"),
    [
        ("no", [LONG, LONG, LONG - 2], "last-weights"),
        slow("epoch", [OWN_LENGTH - 2, OWN_LENGTH - 2, LONG], "checkpoint-2"),
    ],
)
def test_a_batch_of_another_length_is_refused_behind_a_save(
    save: str, lengths: list[int], left: str, pool: RankPool, tmp_path: Path
) -> None:
    for found, said in pool.run(train, 2, lengths, tmp_path, save):
        assert len(found) == 2
        assert "forward keeps model.model.rotary_emb.max_seq_len_cached, at " in said
        assert "pad all batches to one length" in said
    assert (tmp_path / left / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("save", ["no", "epoch"])
def test_all_replicas_save_where_one_meets_it(save: str, pool: RankPool, tmp_path: Path) -> None:
    lengths = [LONG] * 11 + [LONG - 2]
    for found, said in pool.run(train, 2, lengths, tmp_path, save, 2):
        assert len(found) == 2
        assert "pad all batches to one length" in said
    left = "last-weights" if save == "no" else "checkpoint-2"
    assert (tmp_path / left / "manifest.json").is_file()


def loop(lengths: list[int], folder: Path, evaluated: int | None) -> tuple[int, list[str], bool]:
    """Steps of a loop of one's own, its refusals, and whether its last save holds its weights."""
    mesh = merak.init(dp=2, device="cpu")
    batches = [{n: torch.tensor([row[n]]) for n in row} for row in rows(lengths, 1)]
    own = batches[mesh.dp_rank :: 2]
    parallel = merak.parallelize(llama(), own[0], optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    said = []
    try:
        for batch in own:
            parallel.step(batch)
            if evaluated is not None:
                long = LONG - 2 * mesh.dp_rank * (parallel.num_steps == evaluated)
                parallel.evaluate({n: c[:, :long] for n, c in own[0].items()})
    except TraceError as error:
        said.append(str(error))
        parallel.save_checkpoint(folder)
    found = parallel.gather_state_dict()
    saved = parallel.model.state_dict()
    return parallel.num_steps, said, all(torch.equal(found[n], saved[n]) for n in found)


@pytest.mark.parametrize("evaluated", [None, slow(2)])
def test_a_loop_of_ones_own_may_save_where_one_replica_meets_it(
    evaluated: int | None, pool: RankPool, tmp_path: Path
) -> None:
    lengths = [LONG] * 5 + [LONG - 2 * (evaluated is None)]
    for steps, said, is_whole in pool.run(loop, 2, lengths, tmp_path / "saved", evaluated):
        assert steps == 2 and len(said) == 1 and is_whole
        assert "pad all batches to one length" in said[0]


@pytest.mark.parametrize("dp", [slow(1), slow(2)])
def test_an_evaluation_that_meets_it_saves_first(dp: int, pool: RankPool, tmp_path: Path) -> None:
    evaluated = (LONG, LONG - 2)
    for found, said in pool.run(train, 2, [LONG] * 4 * dp**2, tmp_path, "no", dp, evaluated):
        assert len(found) == 2
        assert "pad all batches to one length" in said
    assert (tmp_path / "last-weights" / "manifest.json").is_file()

"""The GRPO loss of `examples/training/rollouts.py` beside that of TRL's own trainer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import LlamaForCausalLM

from examples.training import rollouts
from tests.multirank.trl_jobs import tokenizer

trl = pytest.importorskip("trl")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """All rollouts of a file, as one batch."""
    file = rollouts.made_up(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 4)
    read = rollouts.read(file)
    return {name: torch.stack([sample[name] for sample in read]) for name in read[0]}


def of_trl(
    samples: dict[str, torch.Tensor], folder: Path, **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of TRL's trainer, which got the batch instead of generating one."""
    args = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=len(samples["input_ids"]),
        num_generations=rollouts.GROUP,
        max_completion_length=rollouts.LONGEST,
        epsilon=rollouts.CLIP,
        **options,
    )
    rollouts.language_model().save_pretrained(folder / "model")  # TRL reads its reference there
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 16}),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    completion = slice(4, None)  # of prompts of four tokens
    mask = samples["completion_mask"][:, completion]
    batch = {
        "prompt_ids": samples["input_ids"][:, :4],
        "prompt_mask": samples["attention_mask"][:, :4],
        "completion_ids": samples["input_ids"][:, completion],
        "completion_mask": mask.long(),
        "advantages": samples["advantage"],
        "old_per_token_logps": samples["sampled"][:, completion],
        "ref_per_token_logps": samples["reference"][:, completion],
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model.train(), batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("average", "level", "beta"),
    list(itertools.product(("grpo", "dapo", "dr_grpo"), ("token", "sequence"), (0.0, 0.1))),
)
def test_loss_and_gradients_are_those_of_trl(
    samples: dict[str, torch.Tensor], tmp_path: Path, average: str, level: str, beta: float
) -> None:
    chosen = {"average": average, "level": level, "beta": beta}
    own = type("Own", (rollouts.Grpo,), chosen)()
    model = rollouts.language_model()
    loss = own.compute_loss(model, samples)
    loss.backward()
    options = {"loss_type": average, "importance_sampling_level": level, "beta": beta}
    expected, gradients = of_trl(samples, tmp_path, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert 0 < own.clipped[0] < 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)

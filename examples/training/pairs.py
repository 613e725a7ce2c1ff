"""Losses of pairs: a model that prefers the chosen of two answers to the rejected one (DPO).

torchrun --nproc-per-node 2 examples/training/pairs.py --pp 2
"""

import argparse
import copy
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import logsigmoid

import merak

VOCABULARY, LENGTH, SAMPLES, BETA = 64, 12, 32, 0.5


def language_model() -> nn.Module:
    """A small Llama; in its place, any causal language model."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


class Preference(nn.Module):
    """The model that learns, the frozen one that it started as, and the loss of a pair."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.reference = copy.deepcopy(policy).requires_grad_(False)

    def forward(
        self, chosen_ids: torch.Tensor, rejected_ids: torch.Tensor, answer_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids = torch.cat([chosen_ids, rejected_ids])  # one forward for both
        mask = torch.cat([answer_mask, answer_mask])
        gained = likelihood(self.policy, ids, mask) - likelihood(self.reference, ids, mask)
        chosen, rejected = gained.chunk(2)
        return {"loss": -logsigmoid(BETA * (chosen - rejected)).mean()}


def likelihood(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logarithm of the probability of every answer, (samples,)."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    of_tokens = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (of_tokens * mask[:, 1:]).sum(-1)


def dataset() -> list[dict[str, torch.Tensor]]:
    """Pairs of sequences with equal prompts; the chosen answer counts upwards."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(SAMPLES):
        prompt = torch.randint(VOCABULARY, (LENGTH // 2,), generator=generator)
        chosen = (prompt[-1] + 1 + torch.arange(LENGTH // 2)) % VOCABULARY
        rejected = torch.randint(VOCABULARY, (LENGTH // 2,), generator=generator)
        mask = torch.arange(LENGTH) >= LENGTH // 2
        pair = {"chosen_ids": chosen, "rejected_ids": rejected}
        row = {name: torch.cat([prompt, answer]) for name, answer in pair.items()}
        rows.append({**row, "answer_mask": mask.float()})
    return rows


def settings(output_dir: str, num_steps: int) -> dict[str, Any]:
    """Training arguments, of transformers alone."""
    return {
        "output_dir": output_dir, "max_steps": num_steps, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output-dir", default="runs/pairs")
    options = parser.parse_args()
    merak.init(options.dp, options.tp, options.pp)
    args = merak.MerakArguments(**settings(options.output_dir, options.max_steps))
    merak.MerakTrainer(
        model=Preference(language_model()), args=args, train_dataset=dataset()
    ).train()

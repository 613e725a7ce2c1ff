"""GRPO on rollouts of a file: completions that an inference engine sampled, with their rewards.

torchrun --nproc-per-node 2 examples/training/rollouts.py --pp 2
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn

import merak

VOCABULARY, LENGTH, LONGEST, GROUP, CLIP = 64, 16, 12, 4, 0.2


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


class Grpo:
    """The loss, for transformers' trainer and for Merak's.

    Args:
        average: of tokens: of each completion first ("grpo"), of all tokens of the file ("dapo"),
            or over the longest completion that there may be ("dr_grpo").
        level: of the ratio that is clipped: of each "token", or of each "sequence".
        beta: weight of the distance to the reference, whose log-probabilities the file then has.
    """

    average: ClassVar[str] = "grpo"
    level: ClassVar[str] = "token"
    beta: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clipped: list[float] = []

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The clipped objective of each token, and its distance to the reference, averaged.

        Source: arXiv:2402.03300, equation 3; arXiv:2503.14476 (dapo); arXiv:2503.20783 (dr_grpo);
        arXiv:2507.18071 (sequences); arXiv:2512.02556 (the distance times the ratio).
        """
        ids, mask = inputs["input_ids"], inputs["completion_mask"][:, 1:]
        outputs = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        each = outputs.logits[:, :-1].float().log_softmax(-1)
        own = each.gather(-1, ids[:, 1:, None]).squeeze(-1)
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        change = (own - inputs["sampled"][:, 1:]) * mask
        if self.level == "sequence":
            change = change.sum(-1, keepdim=True) / count * mask
        ratio = torch.exp(change)
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = inputs["advantage"][:, None]
        objective = torch.minimum(ratio * gain, bounded * gain)
        if self.beta:
            behind = (inputs["reference"][:, 1:] - own) * mask
            objective = objective - self.beta * ratio * (torch.exp(behind) - behind - 1)
        if self.average == "dapo":
            count = inputs["mean_tokens"].mean()
        elif self.average == "dr_grpo":
            count = LONGEST
        loss = -((objective * mask) / count).sum(-1).mean()
        self.clipped.append((((ratio != bounded) * mask).sum() / mask.sum()).item())
        return (loss, outputs) if return_outputs else loss


class GrpoTrainer(Grpo, merak.MerakTrainer):
    """The same on ranks."""


def read(file: Path) -> list[dict[str, torch.Tensor]]:
    """Samples of a file with a JSON object for each completion.

    Args:
        file: lines with token ids of `prompt` and `completion`, `logprobs` of the completion's
            tokens as the engine sampled them, a `reward`, and a `group`: of which prompt it is;
            `reference_logprobs`, where a loss asks for them.
    """
    rollouts = [json.loads(line) for line in file.read_text().splitlines()]
    rewards = defaultdict(list)
    for one in rollouts:
        rewards[one["group"]].append(one["reward"])
    samples, num_tokens = [], sum(len(one["completion"]) for one in rollouts)
    for one in rollouts:
        others = torch.tensor(rewards[one["group"]])
        advantage = (one["reward"] - others.mean()) / (others.std() + 1e-4)
        before, count = len(one["prompt"]), len(one["prompt"]) + len(one["completion"])
        places = torch.arange(LENGTH)
        ids, sampled = torch.zeros(LENGTH, dtype=torch.long), torch.zeros(LENGTH)
        ids[:count] = torch.tensor(one["prompt"] + one["completion"])
        sampled[before:count] = torch.tensor(one["logprobs"])
        reference = torch.zeros(LENGTH)
        reference[before:count] = torch.tensor(one.get("reference_logprobs", one["logprobs"]))
        samples.append(
            {
                "input_ids": ids,
                "attention_mask": (places < count).long(),
                "completion_mask": ((places >= before) & (places < count)).float(),
                "sampled": sampled,
                "reference": reference,
                "mean_tokens": torch.tensor(num_tokens / len(rollouts)),
                "advantage": advantage,
            }
        )
    return samples


def made_up(file: Path, num_prompts: int = 8) -> Path:
    """Write rollouts of random tokens, which are rewarded for counting upwards.

    Args:
        file: to write.
        num_prompts: each with a group of completions.
    """
    generator = torch.Generator().manual_seed(1)
    lines = []
    for group in range(num_prompts):
        prompt = torch.randint(VOCABULARY, (4,), generator=generator).tolist()
        for length in range(5, 5 + GROUP):
            tokens = torch.randint(VOCABULARY, (length,), generator=generator)
            one = {"group": group, "prompt": prompt, "completion": tokens.tolist()}
            for name in ("logprobs", "reference_logprobs"):
                one[name] = (torch.randn(length, generator=generator) * 0.3 - 4.2).tolist()
            lines.append(json.dumps({**one, "reward": (tokens.diff() > 0).float().mean().item()}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))
    return file


def settings(output_dir: str, num_steps: int) -> dict[str, Any]:
    """Training arguments, of transformers alone."""
    return {
        "output_dir": output_dir, "max_steps": num_steps, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "learning_rate": 1e-3, "remove_unused_columns": False,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--rollouts", type=Path, help="file of the engine's; by default made up")
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--output-dir", default="runs/rollouts")
    options = parser.parse_args()
    mesh = merak.init(options.dp, options.tp, options.pp)
    file = options.rollouts or made_up(Path(options.output_dir) / f"rollouts-{mesh.rank}.jsonl")
    args = merak.MerakArguments(**settings(options.output_dir, options.max_steps))
    trainer = GrpoTrainer(model=language_model(), args=args, train_dataset=read(file))
    trainer.train()

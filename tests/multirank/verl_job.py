"""Ranks that train by verl's engine interface, and the same on one process without Merak."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, NUM_SAMPLES, MICROBATCH, NUM_STEPS = 64, 8, 2, 3


def saved_model(folder: Path) -> Path:
    """Write a small Llama, as verl finds one on disk."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def batch(seed: int, **settings: Any) -> Any:
    """Prompts and responses as verl's trainer hands them to an engine, without padding."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(seed)
    prompt, response = 5, 9
    ids = torch.randint(1, VOCABULARY, (NUM_SAMPLES, prompt + response), generator=generator)
    before = torch.randint(0, 3, (NUM_SAMPLES, 1), generator=generator)
    after = torch.randint(4, response + 1, (NUM_SAMPLES, 1), generator=generator)
    places = torch.arange(prompt + response)
    mask = ((places >= before) & (places < prompt + after)).long()
    padded = tu.get_tensordict(
        {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask[:, prompt:],
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "old_log_probs": torch.randn(NUM_SAMPLES, response, generator=generator) * 0.3 - 4.2,
            "ref_log_prob": torch.randn(NUM_SAMPLES, response, generator=generator) * 0.3 - 4.2,
            "advantages": torch.randn(NUM_SAMPLES, 1, generator=generator).expand(-1, response),
        }
    )
    found = left_right_2_no_padding(padded)
    given = {"temperature": 0.9, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": MICROBATCH}
    tu.assign_non_tensor(found, global_batch_size=NUM_SAMPLES, **given, **settings)
    return found


def policy_loss() -> Any:
    """verl's loss of an actor, with a KL term and an entropy bonus."""
    from functools import partial

    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(
        strategy="merak",
        rollout_n=2,
        use_kl_loss=True,
        entropy_coeff=0.01,
        use_dynamic_bsz=False,
        ppo_micro_batch_size_per_gpu=MICROBATCH,
    )
    return partial(ppo_loss, config)


def optimizer_config() -> Any:
    from verl.workers.config import OptimizerConfig

    return OptimizerConfig(lr=1e-2, lr_warmup_steps=2, total_training_steps=10, clip_grad=0.2)


Rows = dict[str, list[torch.Tensor]]
Found = tuple[list[Any], Rows, dict[str, torch.Tensor]]


def trained(degrees: dict[str, int], model: Path, folder: Path) -> Found:
    """Losses, metrics and weights of a rank: two steps, a checkpoint, and the third beyond it."""
    os.environ["VERL_ENGINE_DEVICE"] = "cpu"  # verl takes any machine for one with GPUs
    from types import SimpleNamespace

    from verl.workers.engine import EngineRegistry

    from examples.training.verl_engine import MerakEngineConfig

    config = MerakEngineConfig(
        **degrees,
        device="cpu",
        num_microbatches=NUM_SAMPLES // MICROBATCH,
        micro_batch_size_per_gpu=MICROBATCH,
        use_dynamic_bsz=False,
        dtype="float32",
        pad_to=16,
    )
    given = {
        "model_config": SimpleNamespace(local_path=str(model)),
        "engine_config": config,
        "optimizer_config": optimizer_config(),
        "checkpoint_config": None,
    }
    engine = EngineRegistry.new("language_model", "merak", **given)
    engine.initialize()
    replicas, replica = engine.get_data_parallel_size(), engine.get_data_parallel_rank()

    def own(seed: int) -> Any:
        from verl.utils import tensordict_utils as tu

        return tu.chunk_tensordict(batch(seed, calculate_entropy=True), replicas)[replica]

    steps: list[Any] = []
    for step in range(NUM_STEPS):
        with engine.train_mode():
            outputs = engine.train_batch(own(step), policy_loss())
        rate = engine.lr_scheduler_step()
        if engine.is_mp_src_rank_with_outputs():
            steps.append((outputs["loss"], outputs["metrics"]["grad_norm"], rate))
        if step == 0:
            engine.save_checkpoint(str(folder), global_step=1)
            with engine.train_mode():  # a step that the checkpoint undoes
                engine.train_batch(own(9), policy_loss())
            engine.load_checkpoint(str(folder), del_local_after_load=False)
    with engine.eval_mode():
        outputs = engine.infer_batch(own(0))
    made = outputs["model_output"] if engine.is_mp_src_rank_with_outputs() else {}
    weights, _ = engine.get_per_tensor_param()
    rows = {name: list(value.unbind()) for name, value in made.items()}
    return steps, rows, {name: tensor.clone() for name, tensor in weights}


def on_one_process(model: Path) -> Found:
    """The same with transformers' model, torch's optimizer and verl's loss alone."""
    from verl.utils import tensordict_utils as tu

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = optimizer_config()
    adam = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    rates = transformers.get_scheduler("constant_with_warmup", adam, config.lr_warmup_steps)
    steps: list[Any] = []

    def outputs_of(data: Any) -> dict[str, torch.Tensor]:
        rows: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
        for ids in data["input_ids"].unbind():
            each = (policy(input_ids=ids[None]).logits[0] / 0.9).log_softmax(-1)
            own = each.gather(-1, ids.roll(-1)[:, None])[:, 0]
            rows["log_probs"].append(own)
            rows["entropy"].append(-(each.exp() * each).sum(-1))
        made = torch.nested.as_nested_tensor
        return {name: made(given, layout=torch.jagged) for name, given in rows.items()}

    for step in range(NUM_STEPS):
        data = batch(step)
        count = data["loss_mask"].sum().item()
        tu.assign_non_tensor(data, batch_num_tokens=count, dp_size=1)
        losses = []
        adam.zero_grad()
        for part in tu.chunk_tensordict(data, NUM_SAMPLES // MICROBATCH):
            loss, _ = policy_loss()(model_output=outputs_of(part), data=part)
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.clip_grad).item()
        adam.step()
        rates.step()
        steps.append((losses, norm, rates.get_last_lr()[0]))
    with torch.no_grad():
        made = outputs_of(batch(0))
    rows = {name: list(value.unbind()) for name, value in made.items()}
    return steps, rows, policy.state_dict()

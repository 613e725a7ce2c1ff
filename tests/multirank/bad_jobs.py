"""A script that fails, for torchrun: `bad_jobs.py CASE FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import merak

torch.set_num_threads(1)
FOLDER = Path(sys.argv[2])


def degrees() -> None:
    merak.init(dp=2, pp=2, device="cpu")


def missing() -> None:
    merak.current_mesh()


def twice() -> None:
    mesh = merak.init(pp=2, device="cpu")
    assert merak.init(pp=2, device="cpu") is mesh
    merak.init(dp=2, device="cpu")


def collator() -> None:
    from transformers import default_data_collator

    train(data_collator=fail_on(1, default_data_collator))


def callback() -> None:
    train(callbacks=[at_step_2(fail_on(1, lambda: None))])


def saves_alone() -> None:
    trainer = train(saves=False)
    if trainer.is_world_process_zero():
        trainer.save_model()


def saves_alone_from_disk() -> None:
    trainer = train()
    if trainer.is_world_process_zero():
        trainer.save_model()


def killed() -> None:
    def kill() -> None:
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(callbacks=[at_step_2(kill)])


def leaves() -> None:
    def leave() -> None:
        if int(os.environ["RANK"]) == 1:
            sys.exit(0)  # for the launcher no failure

    train(callbacks=[at_step_2(leave)])


def stalled() -> None:
    train(samples=Samples(0), hang_limit_s=6.0)  # rank 0 reads the inputs


def not_a_number() -> None:
    train(learning_rate=1e30)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples, of which one takes for ever on some rank."""

    def __init__(self, bad_rank: int | None = None) -> None:
        self.bad_rank = bad_rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 40 and self.bad_rank == int(os.environ["RANK"]):
            time.sleep(300)
        ids = torch.full((8,), index % 32)
        return {"input_ids": ids, "labels": ids}


def fail_on(rank: int, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*args: object) -> Any:
        if int(os.environ["RANK"]) == rank:
            raise OSError("this rank has a reason")
        return otherwise(*args)

    return fail


def at_step_2(action: Callable[[], object]) -> Any:
    import transformers

    class AtStep2(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                action()

    return AtStep2()


def train(
    samples: Samples | None = None,
    learning_rate: float = 1e-3,
    hang_limit_s: float = 600.0,
    saves: bool = True,
    **kwargs: Any,
) -> Any:
    import transformers

    merak.init(pp=2, device="cpu")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    args = merak.MerakArguments(
        output_dir=str(FOLDER / "output"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=learning_rate,
        max_steps=8,
        save_steps=8,
        save_strategy="steps" if saves else "no",
        save_last_weights=saves,
        report_to=[],
        disable_tqdm=True,
        hang_limit_s=hang_limit_s,
    )
    model = transformers.GPT2LMHeadModel(config)
    dataset = samples if samples is not None else Samples()
    trainer = merak.MerakTrainer(model=model, args=args, train_dataset=dataset, **kwargs)
    trainer.train()
    return trainer


if __name__ == "__main__":
    globals()[sys.argv[1]]()

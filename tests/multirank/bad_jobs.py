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


def dataset() -> None:
    train(samples=Samples(0))  # rank 0 reads the inputs


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
    train(samples=Samples(0, slow=True), hang_limit_s=6.0)  # rank 0 reads the inputs


def not_a_number() -> None:
    train(learning_rate=1e30)


def stages() -> None:
    merak.init(pp=2, device="cpu")
    batch = {"x": torch.ones(2, 2)}
    merak.parallelize(Tiny(), batch)


class Tiny(torch.nn.Module):
    """A model of a single segment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples, of which one raises on some rank, or takes for ever."""

    def __init__(self, bad_rank: int | None = None, slow: bool = False) -> None:
        self.bad_rank = bad_rank
        self.slow = slow

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 40 and self.bad_rank == int(os.environ["RANK"]):
            if self.slow:
                time.sleep(300)
            raise OSError("sample 40 cannot be read")
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

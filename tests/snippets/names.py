"""What programs of the docs find without having made it: a model, data, files of the reader's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from merak.core.mesh import reset

VOCABULARY, SEQUENCE, WIDTH = 61, 12, 16
SMALL = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16,
    "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
}  # fmt: skip
"""Sizes of a GPT-2."""
Names = dict[str, Any]


def merak_itself() -> Names:
    """The import that an earlier block of the page shows."""
    import merak

    return {"merak": merak, "torch": torch}


def job() -> Names:
    """A job of this one rank."""
    import merak

    merak.init()
    return merak_itself()


def small_config() -> Names:
    """In place of GPT-2's own sizes small ones, and nothing else."""
    import transformers

    transformers.GPT2Config = functools.partial(transformers.GPT2Config, **SMALL)
    return {}


def gpt2() -> Names:
    """A small GPT-2 and texts for it."""
    texts: Dataset[Any] = Texts()
    halves = {"train": Subset(texts, range(48)), "held_out": Subset(texts, range(48, 64))}
    return {"model": small_gpt2(), "dataset": texts, **halves}


def small_gpt2() -> nn.Module:
    """A GPT-2 of two layers, with weights from a fixed seed."""
    import transformers

    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences, whose labels are the sequences themselves."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, VOCABULARY, (64, SEQUENCE), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def plain() -> Names:
    """A plain model that returns its loss where it gets a target, with batches for it."""
    generator = torch.Generator().manual_seed(0)

    def made() -> dict[str, torch.Tensor]:
        x = torch.randn(8, WIDTH, generator=generator)
        return {"x": x, "target": x.roll(1, 1)}

    torch.manual_seed(0)
    return {"model": Plain(), "batch": made(), "batches": [made(), made()], "other_batch": made()}


class Plain(nn.Module):
    """Four layers between vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def two_replicas() -> Names:
    """A job of two replicas that `merak.init` has made, and a model with its loss inside."""
    import merak

    merak.init(dp=2)
    texts = Texts()
    batch = {name: torch.stack([texts[n][name] for n in range(8)]) for name in texts[0]}
    return {"model": small_gpt2(), "batch": batch}


def plan_file() -> Names:
    """`plan.json`: the best plan of a small GPT-2 on two devices."""
    from tests.snippets.programs import on_rank_0

    on_rank_0(_write_plan)
    return {}


def _write_plan() -> None:
    from merak.cli.main import main

    model = ["--model", "GPT2LMHeadModel", "--config", json.dumps(SMALL), "--seq", str(SEQUENCE)]
    job = ["--cluster", "h100:2x1", "--global-batch", "8", "--pp", "2", "--output", "plan.json"]
    assert main(["plan", *model, *job]) == 0


def trained() -> Names:
    """A trainer after its training on two stages."""
    import merak

    merak.init(pp=2)
    args = merak.MerakArguments(
        output_dir="runs/trained",
        max_steps=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to="none",
    )
    trainer = merak.MerakTrainer(model=small_gpt2(), args=args, train_dataset=Texts())
    trainer.train()
    return {"trainer": trainer}


def schedule_file() -> Names:
    """`mine.txt`, a schedule of two ranks and four microbatches."""
    from merak import schedule
    from merak.schedule.serialize import to_text
    from tests.snippets.programs import on_rank_0

    text = to_text(schedule.build("1f1b", 2, 4))
    on_rank_0(functools.partial(Path("mine.txt").write_text, text))
    return {}


def checkpoint() -> Names:
    """`runs/gpt2` with a checkpoint of two steps, written with tp=2 and pp=2."""
    import torch.distributed as dist

    import merak

    merak.init(tp=2, pp=2)
    args = merak.MerakArguments(
        output_dir="runs/gpt2",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=2,
        report_to="none",
    )
    trainer = merak.MerakTrainer(model=small_gpt2(), args=args, train_dataset=gpt2()["train"])
    trainer.train()
    dist.barrier()
    reset()
    return {}


def folder() -> Names:
    """`path/to/folder`, which `from_pretrained` reads."""
    small_gpt2().save_pretrained("path/to/folder")  # type: ignore[operator]
    return {}


def saved() -> Names:
    """The weights of the plain model, as `save_model` writes them."""
    from safetensors.torch import save_model

    Path("folder").mkdir()
    model = Plain()
    save_model(model, "folder/model.safetensors")
    return {"model": model}


NAMES: Mapping[str, Callable[[], Names]] = {
    "merak": merak_itself,
    "job": job,
    "small_config": small_config,
    "gpt2": gpt2,
    "plain": plain,
    "dp2": two_replicas,
    "plan_file": plan_file,
    "trained": trained,
    "schedule_file": schedule_file,
    "checkpoint": checkpoint,
    "folder": folder,
    "saved": saved,
}
"""What a comment above a block may ask for."""

"""Numbers that go wrong on ranks: operators are located, replicas compared, jobs rolled back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import merak
from merak.core.errors import TrainingError
from tests.multirank.ranks import RankPool
from tests.multirank.training import VOCABULARY, Setup, Texts, gpt2, loss_of_logits, make_merak
from tests.tiers import slow

WIDTH, SAMPLES = 8, 8


class LogOfNegative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x + 10)


class RootOfZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(torch.exp(x * 10))  # whose slope is infinite at 0


class Blocks(nn.Module):
    """Blocks, of which the third has a module of the test's own behind it."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.own = own

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) + x
            if number == 2:
                x = self.own(x)
        return {"loss": x.square().mean()}


def locate(degrees: dict[str, int], options: dict[str, Any], own: str) -> str:
    """What a job says of a step in which one sample of one replica is bad."""
    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    x = torch.linspace(0.5, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)
    if mesh.dp_rank == mesh.dp - 1:
        x[-1] = -100.0
    module = {"log": LogOfNegative, "root": RootOfZero}[own]()
    parallel = merak.parallelize(
        Blocks(module),
        {"x": x},
        num_microbatches=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        locate_nan=True,
        **options,
    )
    with pytest.raises(TrainingError) as caught:
        parallel.step({"x": x})
    return str(caught.value)


LAYOUTS = [
    ({"pp": 2}, {}, "log"),
    slow({"dp": 2}, {"zero": 3}, "root"),
    slow({"pp": 2}, {"schedule": "zero_bubble_h1", "recompute": "off"}, "log"),
    slow({"pp": 2}, {"schedule": "chimera"}, "root"),
    slow({"tp": 2}, {"sub_pipelining": "on"}, "root"),
]


@pytest.mark.parametrize("degrees,options,own", LAYOUTS)
def test_the_operator_is_located(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any], own: str
) -> None:
    first, second = pool.run(locate, 2, degrees, options, own)
    assert first == second
    replica = " of replica 1" if degrees.get("dp") else ""
    if own == "log":
        where = rf"\(NaN first appeared in the forward of microbatch 3{replica}, in segment "
        line = (
            re.escape("operator aten.log of module own at ") + r".*`return torch\.log\(x \+ 10\)`"
        )
    else:
        where = rf"first appeared in the backward of microbatch 3{replica}, in segment "
        line = re.escape("the gradient of operator aten.sqrt of module own at ")
    assert re.search(where + r"\d \(.*\): " + line, first), first


def flip(degrees: dict[str, int], options: dict[str, Any], name: str, rank: int) -> str:
    """What a job says after a bit of a parameter has changed on one rank."""
    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    parallel = merak.parallelize(
        gpt2(),
        batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        **options,
    )
    for _ in range(2):
        parallel.step(batch)
    parallel.check_replicas()
    if mesh.rank == rank:
        bits = parallel.engine.parameters[name].detach().view(-1).view(torch.int32)
        bits[5] ^= 1 << 3
    with pytest.raises(TrainingError) as caught:
        parallel.check_replicas()
    return str(caught.value)


@pytest.mark.parametrize(
    "degrees,options,name",
    [
        ({"dp": 2}, {}, "transformer.h.1.mlp.c_fc.weight"),
        slow({"pp": 2}, {}, "transformer.wte.weight"),  # tied
        slow({"tp": 2}, {}, "transformer.h.0.ln_1.weight"),  # which tp does not split
        slow({"pp": 2}, {"schedule": "chimera"}, "transformer.h.0.ln_1.weight"),
    ],
)
def test_one_bit_of_one_copy_is_found(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any], name: str
) -> None:
    said = set(pool.run(flip, 2, degrees, options, name, 1))
    (sentence,) = said
    assert sentence.startswith(f"after step 2, parameter {name} differs on ranks 0, 1, though all")


@pytest.mark.slow
def test_the_rank_that_is_odd_is_named(pool: RankPool) -> None:
    (sentence,) = set(pool.run(flip, 4, {"dp": 4}, {}, "transformer.ln_f.weight", 2))
    assert "parameter transformer.ln_f.weight differs on rank 2 from the one on ranks 0, 1, 3" in (
        sentence
    )


class Seen(TrainerCallback):
    """Parameters after every step, on this rank."""

    def __init__(self) -> None:
        self.parameters: list[dict[str, torch.Tensor]] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.trainer.engine
        self.parameters.append({n: p.detach().clone() for n, p in engine.parameters.items()})


def bad_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Infinite for a sample whose labels are all the last token."""
    is_bad = ((labels == VOCABULARY - 1) | (labels == -100)).all(dim=1).any()
    return loss_of_logits(outputs, labels, num_items_in_batch) / (~is_bad).float()


def roll_back(degrees: dict[str, int], folder: str, most: int) -> dict[str, Any]:
    """A job whose fifth step of 16 samples is bad, with a checkpoint after the third."""
    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    seen = Seen()
    arguments = {
        "max_steps": 7, "nan_policy": "rollback", "max_rollbacks": most, "save_steps": 3,
        "save_strategy": "steps", "output_dir": folder, "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2, "check_replicas_steps": 1,
    }  # fmt: skip
    trainer = make_merak(
        Setup("plain", arguments=arguments),
        mesh.dp,
        "",
        compute_loss_func=bad_loss,
        train_dataset=Texts(112, padded=False),
        callbacks=[seen],
    )
    seen.trainer = trainer
    trainer.train_dataset.ids[68] = VOCABULARY - 1
    try:
        trainer.train()
        said = ""
    except TrainingError as error:
        said = str(error)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "said": said,
        "seen": seen.parameters,
        "losses": [log["loss"] for log in logs],
        "rates": [log["learning_rate"] for log in logs],
        "step": trainer.state.global_step,
    }


@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, slow({"dp": 2})]
)  # fmt: skip
def test_a_job_goes_back_to_its_checkpoint_and_on_with_the_data_after_the_step(
    pool: RankPool, tmp_path: Path, degrees: dict[str, int]
) -> None:
    for found in pool.run(roll_back, 2, degrees, str(tmp_path), 1):
        seen = found["seen"]
        assert found["said"] == ""
        assert found["step"] == 7
        assert len(seen) == 7
        assert all(torch.equal(seen[2][name], seen[4][name]) for name in seen[2])
        assert any(not torch.equal(seen[4][name], seen[5][name]) for name in seen[2])
        assert [math.isfinite(loss) for loss in found["losses"]] == [n != 4 for n in range(7)]
        assert found["rates"][5] == found["rates"][3]  # that of the step after the checkpoint


@pytest.mark.slow
def test_a_job_does_not_roll_back_for_ever(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(roll_back, 2, {"pp": 2}, str(tmp_path), 0):
        assert found["said"].startswith("step 5 has loss ")
        assert "after 0 rollbacks; lower the learning rate" in found["said"]

"""After training, a model is read whole, or the script is told what to call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError, WeightsError
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    Layout,
    Setup,
    Texts,
    alone,
    make_merak,
    make_reference,
    model_of,
)
from tests.tiers import slow

SETUP = Setup(
    "gpt2",
    padded=False,
    arguments={"max_steps": 2, "optim": "sgd"},
)
MERAK = Setup(
    "gpt2",
    padded=False,
    arguments=SETUP.arguments | {"save_last_weights": False},
)
METHODS = ("state_dict", "save_pretrained", "generate", "forward", "load_state_dict")


def use(model: Any, folder: Path) -> dict[str, str]:
    """What is said of each method that needs the whole model."""
    calls = {
        "state_dict": model.state_dict,
        "save_pretrained": lambda: model.save_pretrained(folder),
        "generate": lambda: model.generate(torch.ones(1, 3, dtype=torch.long)),
        "forward": lambda: model(input_ids=torch.ones(1, 3, dtype=torch.long)),
        "load_state_dict": lambda: model.load_state_dict({}),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(WeightsError) as caught:
            call()
        said[name] = str(caught.value)
    return said


def freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h." in name)
    return model


def losses(trainer: Any) -> list[float]:
    return [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]


def train(layout: Layout, zero: int, cache: str, folder: str) -> dict[str, Any]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    setup = Setup("gpt2", padded=False, arguments=MERAK.arguments | {"zero": zero})
    first = make_merak(setup, dp, cache)
    first.train()
    model = first.model
    said = use(model, Path(folder))
    first.save_model(folder)
    files = sorted(path.name for path in Path(folder).iterdir())  # all there are, on every rank
    whole = first.gather_state_dict()
    evaluated = first.evaluate(Texts(8, seed=3))["eval_loss"]
    seen = losses(first)
    second = make_merak(setup, dp, cache, model=freeze(model))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second.train()
    with pytest.raises(TrainingError, match="was given this trainer's model"):
        first.train()
    last = second.gather_state_dict()
    with pytest.raises(TrainingError, match=r"rank 0 trainer.save_model, rank 1 trainer.evaluate"):
        if second.is_world_process_zero():
            second.save_model(folder)
        else:
            second.evaluate(Texts(8, seed=3))
    return {
        "said": said,
        "files": files,
        "whole": whole,
        "state": state,
        "evaluated": evaluated,
        "losses": seen + losses(second),
        "last": last,
    }


def reference() -> dict[str, Any]:
    with alone():
        first = make_reference(SETUP)
        first.train()
        model: Any = first.model
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        evaluated = first.evaluate(Texts(8, seed=3))["eval_loss"]  # type: ignore[arg-type]
        second = make_reference(SETUP, model=freeze(model))
        second.train()
    return {
        "whole": whole,
        "evaluated": evaluated,
        "losses": losses(first) + losses(second),
        "last": model.state_dict(),
    }


@pytest.mark.parametrize("layout,zero", [((1, 1, 2), 0), slow((2, 1, 1), 3)])
def test_a_model_after_training(
    pool: RankPool, cache: str, tmp_path: Path, layout: Layout, zero: int
) -> None:
    folder = str(tmp_path / "model")
    first, other = pool.run(train, 2, layout, zero, cache, folder)
    expected = reference()
    initial = model_of(SETUP).state_dict()
    assert first["whole"].keys() == expected["whole"].keys() == initial.keys()
    for name, tensor in expected["whole"].items():
        torch.testing.assert_close(first["whole"][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            first["last"][name], expected["last"][name], rtol=1e-3, atol=1e-4
        )
        for rank in (first, other):
            assert torch.equal(rank["state"][name], first["whole"][name])
    assert other["whole"] == other["last"] == {}
    for rank in (first, other):
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=1e-4, atol=1e-5)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-4)
        assert {"config.json", "model.safetensors", "training_args.json"} <= set(rank["files"])
        assert rank["said"].keys() == set(METHODS)
        for name, sentence in rank["said"].items():
            assert sentence.startswith(f"{name} of the model needs all of its weights")
        assert "call gather_state_dict()" in rank["said"]["state_dict"]
        assert "merak.callable_model(model) as whole" in rank["said"]["generate"]

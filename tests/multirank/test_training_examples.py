"""Examples of the pages on training: at pp=2 and tp=2 as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.training import adversarial, gan, lr_finder, pairs, rollouts
from tests.multirank.ranks import RankPool
from tests.tiers import slow

LAYOUTS = pytest.mark.parametrize("degrees", [{"pp": 2}, slow({"tp": 2})], ids=("pp2", "tp2"))
NUM_STEPS = 3


def on_mesh(function: Any, degrees: dict[str, int], *arguments: Any) -> Any:
    """Run a function of an example on ranks of a mesh."""
    import merak

    merak.init(**degrees, device="cpu")
    return function(*arguments)


@LAYOUTS
def test_gan(degrees: dict[str, int], pool: RankPool) -> None:
    """Two losses, and two optimizers that each step after the backward of its own."""
    model = gan.Gan()
    optimizers = [
        torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        torch.optim.Adam(model.critic.parameters(), lr=4e-3, betas=(0.0, 0.9)),
    ]
    losses = []
    for batch in gan.batches(NUM_STEPS):
        outputs = model(**batch)
        networks = (model.generator, model.critic)
        for network, name in zip(networks, ("fooled", "caught"), strict=True):
            weights = list(network.parameters())
            gradients = torch.autograd.grad(outputs[name], weights, retain_graph=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        losses.append(outputs["loss"].item())
    found = pool.run(on_mesh, 2, gan.train, degrees, NUM_STEPS)
    assert found[0][0] == pytest.approx(losses, rel=1e-5)
    assert_same(found[0][1], model.state_dict())


MODELS = {
    "pairs": (lambda: pairs.Preference(pairs.language_model()), pairs),
    "adversarial": (adversarial.classifier, adversarial),
    "rollouts": (rollouts.language_model, rollouts),
}
LOSSES = {"adversarial": adversarial.Adversarial, "rollouts": rollouts.Grpo}


def trained(name: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of Merak's trainer."""
    import merak

    build, module = MODELS[name]
    args = merak.MerakArguments(**module.settings(folder, NUM_STEPS), use_cpu=True)
    own = {"adversarial": adversarial.AdversarialTrainer, "rollouts": rollouts.GrpoTrainer}
    cls = own.get(name, merak.MerakTrainer)
    trainer = cls(model=build(), args=args, train_dataset=samples(name, folder))
    trainer.train()
    return losses_of(trainer), trainer.engine.gather_state_dict()


def samples(name: str, folder: str) -> Any:
    """The dataset of an example, which may write a file for it."""
    if name != "rollouts":
        return MODELS[name][1].dataset()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return rollouts.read(rollouts.made_up(Path(folder) / f"{rank}.jsonl"))


def losses_of(trainer: Any) -> list[float]:
    """Losses, and what the loss has kept."""
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return [*losses, *getattr(trainer, "clipped", [])]


@LAYOUTS
@pytest.mark.parametrize("name", ["pairs", "adversarial", slow("rollouts")])
def test_losses_of_a_trainer(
    name: str, degrees: dict[str, int], pool: RankPool, tmp_path: Path
) -> None:
    """Beside transformers' own trainer with the same code."""
    build, module = MODELS[name]
    args = transformers.TrainingArguments(
        **module.settings(str(tmp_path / "one"), NUM_STEPS), use_cpu=True
    )
    losses = (LOSSES[name],) if name in LOSSES else ()
    own = type("Own", (*losses, transformers.Trainer), {})
    trainer = own(model=build(), args=args, train_dataset=samples(name, str(tmp_path / "one")))
    trainer.train()
    found, *_ = pool.run(on_mesh, 2, trained, degrees, name, str(tmp_path / "two"))
    assert found[0] == pytest.approx(losses_of(trainer), rel=1e-4)
    assert len(found[0]) == (5 if name == "rollouts" else 1) * NUM_STEPS
    assert_same(found[1], trainer.model.state_dict())


@LAYOUTS
def test_learning_rate_finder(degrees: dict[str, int], pool: RankPool, tmp_path: Path) -> None:
    """The finder diverges; the training behind it begins with the weights of before."""
    found, losses = pool.run(on_mesh, 2, lr_finder.train, degrees, 12, 3, str(tmp_path))[0]
    assert len(found) == 12 or found[-1] > 4 * min(found)
    model = lr_finder.Regression()
    first = model(**next(lr_finder.batches()))["loss"].item()
    assert found[0] == pytest.approx(first, rel=1e-5)
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert losses[-1] < losses[0]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)

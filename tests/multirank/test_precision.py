"""Mixed precision on many ranks against transformers.Trainer's in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.multirank.compare import assert_same_losses_everywhere, whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    Layout,
    Outcome,
    Setup,
    make_merak,
    train_merak,
    train_reference,
)
from tests.tiers import slow

STEPS = {"max_steps": 8, "learning_rate": 3e-3, "max_grad_norm": 0.5}
BF16 = [Setup(family, arguments={**STEPS, "bf16": True}) for family in ("gpt2", "plain")]
# bfloat16 keeps 8 bits: sums of products in another order differ by parts of 2⁻⁸.
ROUNDING = 2.0**-8


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> tuple[list[Outcome], list[Outcome]]:
    """What one process saw in bfloat16 and in float32."""
    single = [replace(setup, arguments=STEPS) for setup in BF16]
    (outcomes,) = pool.run(train_reference, 1, [*BF16, *single])
    return outcomes[: len(BF16)], outcomes[len(BF16) :]


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 2, 1))])
def test_bf16_is_that_of_transformers(
    pool: RankPool, alone: tuple[list[Outcome], list[Outcome]], cache: str, layout: Layout
) -> None:
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, BF16, cache)
    for number, (expected, single) in enumerate(zip(*alone, strict=True)):
        found = [rank[number] for rank in ranks]
        assert_same_losses_everywhere(found)
        assert expected.losses != single.losses
        assert found[0].losses == pytest.approx(expected.losses, rel=ROUNDING)
        first = whole(found, "first")
        for name, gradient in expected.first.items():
            assert first[name].dtype == torch.float32
            difference = (first[name] - gradient).norm() / gradient.norm()
            noise = (single.first[name] - gradient).norm() / gradient.norm()
            # Half the model's products are rounded in another order: as far as bf16 is from fp32.
            assert difference <= max(2 * noise, ROUNDING), name
        assert all(p.dtype == torch.float32 for p in whole(found, "final").values())


def half(folder: str, layout: Layout, resume: str | None, cache: str) -> dict[str, Any]:
    """Train in fp16 from a scale that is far too large."""
    import merak

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    arguments = {
        **STEPS, "fp16": True, "save_strategy": "steps", "save_steps": 6, "output_dir": folder,
        "learning_rate": 1e-3,
    }  # fmt: skip
    trainer = make_merak(Setup("gpt2", arguments=arguments), dp, cache)
    trainer.scaler.update(2.0**22)
    trainer.scaler.set_growth_interval(2)
    seen: dict[str, Any] = {"scales": [], "moved": [], "place": mesh.pp_rank}
    end, update = trainer.callback_handler.on_step_end, trainer.scaler.adapt
    before: dict[str, torch.Tensor] = {}

    def note(overflow: bool) -> None:
        seen["scales"].append(trainer.scaler.get_scale())
        before.update({n: p.detach().clone() for n, p in trainer.engine.parameters.items()})
        update(overflow)

    def ended(*args: Any, **kwargs: Any) -> Any:
        named = trainer.engine.parameters.items()
        seen["moved"].append(any(not torch.equal(p, before[n]) for n, p in named))
        return end(*args, **kwargs)

    trainer.scaler = trainer._skipped.check.scaler = _Noted(trainer.scaler, note)
    trainer.callback_handler.on_step_end = ended
    trainer.train(resume_from_checkpoint=resume)
    seen["losses"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    seen["rates"] = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
    return seen


class _Noted:
    """A loss scale whose updates are written down."""

    def __init__(self, scaler: Any, adapt: Any) -> None:
        self.scaler, self.adapt = scaler, adapt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)


@pytest.mark.slow
def test_all_ranks_skip_the_same_steps_and_the_scale_is_kept(
    pool: RankPool, tmp_path: Any, cache: str
) -> None:
    whole_run = pool.run(half, 4, str(tmp_path), (2, 1, 2), None, cache)
    for rank in whole_run:
        for key in ("scales", "moved", "losses"):
            assert rank[key] == whole_run[0][key], key
    seen = whole_run[0]
    skipped = seen["moved"].index(True)
    assert skipped >= 2
    scale, good = 2.0**22, 0
    for moved, found in zip(seen["moved"], seen["scales"], strict=True):
        assert found == scale
        good = good + 1 if moved else 0
        scale = scale / 2 if not moved else scale
        if good == 2:
            scale, good = 2 * scale, 0
    assert seen["scales"][skipped + 2] > seen["scales"][skipped]  # after two good steps
    assert len(set(seen["rates"][: skipped + 1])) == 1  # the schedule waits for the first update
    # In another layout, from the middle, the same scales and losses.
    again = pool.run(half, 2, str(tmp_path), (1, 2, 1), str(tmp_path / "checkpoint-6"), cache)
    assert again[0]["scales"] == seen["scales"][6:]
    assert again[0]["losses"] == pytest.approx(seen["losses"], rel=2e-3)

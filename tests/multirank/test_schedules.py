"""Every schedule that the engine runs gives one process's gradients, tied weights included."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from merak.core.errors import ScheduleError
from merak.core.mesh import init
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.layout import EngineOptions
from merak.engine.plans import Plans
from merak.graph.build import GraphSource
from merak.schedule.registry import build, names
from merak.schedule.serialize import to_json

REFUSED = ("chimera", "gems", "pipedream", "pipedream_2bw")
RUN = tuple(name for name in names() if name not in REFUSED)


def tiny_gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of uneven segments, with tied weights and dropout, the same on every rank."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=48,
        n_positions=16,
        use_cache=False,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Microbatches with their labels."""
    draws = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 48, (2, 16), generator=draws) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


def gradients(schedules: list[str], pp: int, counts: list[int]) -> dict[str, list[dict]]:
    """Losses and gradients of one step, per schedule and number of microbatches."""
    mesh = init(pp=pp)
    found = {}
    for schedule in schedules:
        options = EngineOptions(schedule=schedule, num_microbatches=max(counts))
        sample = signature(batches(1)[0]).columns
        engine = build_engine(GraphSource(tiny_gpt2()), sample, mesh, options)
        found[schedule] = []
        for count in counts:
            losses = engine.train_step(0, [sample] * count, batches(count), 1.0 / count)
            grads = {name: p.grad.clone() for name, p in engine.parameters.items()}
            found[schedule].append({"losses": losses, "gradients": grads})
            for parameter in engine.parameters.values():
                parameter.grad = None
    return found


@pytest.mark.parametrize(("pp", "counts"), [(2, [4, 1, 3]), (3, [6, 5])])
def test_all_schedules_give_the_gradients_of_one_process(pool, tmp_path, pp, counts):
    # The same dropout patterns come from the same engine on one rank; parity of that engine with
    # eager PyTorch is tested elsewhere.
    (reference,) = pool.run(gradients, 1, ["1f1b"], 1, counts)
    own = tmp_path / "own.json"
    own.write_text(to_json(build("gpipe", pp, max(counts))))
    by_rank = pool.run(gradients, pp, [*RUN, str(own)], pp, counts)
    for schedule in (*RUN, str(own)):
        for step, expected in enumerate(reference["1f1b"]):
            held = set()
            for rank in by_rank:
                got = rank[schedule][step]
                assert torch.equal(got["losses"], expected["losses"]), schedule
                held |= got["gradients"].keys()
                for name, gradient in got["gradients"].items():
                    assert torch.equal(gradient, expected["gradients"][name]), (schedule, name)
            assert held == expected["gradients"].keys()


@pytest.mark.parametrize("name", REFUSED)
def test_schedules_that_the_engine_does_not_run_are_refused(name):
    with pytest.raises(ScheduleError, match="which the engine does not run; use"):
        Plans(name, 4, 8)

"""The loss scale against torch's own."""

from __future__ import annotations

import torch

from merak.engine.step.loss_scale import LossScale


def test_it_grows_and_falls_as_torchs_does() -> None:
    ours, theirs = LossScale(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in map(bool, (1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)):
        weight.grad = theirs.scale(torch.tensor(float("inf") if overflow else 1.0))
        theirs.step(optimizer)
        theirs.update()
        ours.adapt(torch.tensor(float(overflow)))
        assert ours.state_dict() == theirs.state_dict()


def test_a_checkpoint_of_torchs_scale_is_read() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    theirs.scale(torch.ones(()))
    ours = LossScale()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    before = ours.current()
    ours.adapt(torch.tensor(1.0))
    assert (float(before), float(ours.current())) == (8.0, 4.0)

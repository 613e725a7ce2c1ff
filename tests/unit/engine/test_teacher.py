"""Averages of a teacher on one device, and what does not fit."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import ArgumentsError
from merak.engine.parameters import gathered, teacher


def pair() -> nn.ModuleDict:
    online = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    target = nn.Sequential(copy.deepcopy(online[0])).requires_grad_(False)
    nn.init.zeros_(target[0].weight)
    return nn.ModuleDict({"online": online, "target": target})


def test_a_model_on_one_device_is_averaged() -> None:
    model = pair()
    expected = 0.1 * model["online"][0].weight
    merak.average_teacher(model, "target", "online", 0.9)
    torch.testing.assert_close(model["target"][0].weight, expected, check_stride=False)
    assert not model["target"][0].weight.requires_grad


@pytest.mark.parametrize(
    ("teacher", "student", "decay", "said"),
    [
        ("traget", "online", 0.9, "no submodule 'traget'; did you mean target or"),
        ("target", "online.0", 0.9, "target.0.weight has no parameter to follow"),
        ("online.0", "target.0", 0.9, "online.0.weight is trained; freeze the teacher"),
        ("target", "online", 1.5, "decay=1.5 is no part of an average"),
    ],
)
def test_what_does_not_fit_is_refused(teacher: str, student: str, decay: float, said: str) -> None:
    with pytest.raises(ArgumentsError, match=said.replace("?", r"\?")):
        merak.average_teacher(pair(), teacher, student, decay)


def test_averages_of_a_model_that_is_not_laid_out_are_refused() -> None:
    with (
        pytest.raises(ArgumentsError, match="not laid out; train it with MerakTrainer or merak"),
        merak.averaged_parameters(pair()),
    ):
        pass


def test_shapes_are_compared() -> None:
    model = pair()
    model["target"][0] = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ArgumentsError, match=r"is of shape \(3, 4\), and online.0.weight of"):
        merak.average_teacher(model, "target", "online", 0.9)


def test_parameters_of_a_model_on_one_device_are_whole() -> None:
    model = pair()
    with merak.gathered_parameters(model, ["online.0.weight"]) as whole:
        whole["online.0.weight"].fill_(2.0)
    assert model["online"][0].weight.detach().eq(2.0).all()
    with merak.gathered_parameters(model) as whole:
        assert whole.keys() == dict(model.named_parameters()).keys()
    with (
        pytest.raises(ArgumentsError, match=r"no parameter 'online.0.wight'; did you mean"),
        merak.gathered_parameters(model, "online.0.wight"),
    ):
        pass


def test_a_model_on_one_device_is_streamed_by_the_names_of_its_state_dict() -> None:
    model = pair()
    model["online"].register_buffer("count", torch.ones(2))
    model["online"].register_buffer("scratch", torch.ones(2), persistent=False)
    model["head"] = nn.Linear(4, 4)
    model["head"].weight = model["online"][0].weight
    found = dict(merak.stream_weights(model))
    assert found.keys() == model.state_dict().keys()
    torch.testing.assert_close(found, dict(model.state_dict()))


def test_replicas_with_models_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = pair(), SimpleNamespace(local_steps=object())
    for module in (teacher, gathered):
        monkeypatch.setattr(module, "engine_of", lambda model: engine)
    with pytest.raises(ArgumentsError, match=r"each has its own between rounds; leave local_steps"):
        merak.average_teacher(model, "target", "online", 0.9)
    with (
        pytest.raises(ArgumentsError, match=r"each has its own between rounds; leave local_steps"),
        merak.gathered_parameters(model),
    ):
        pass
    with pytest.raises(ArgumentsError, match=r"stream_weights needs .* leave local_steps out"):
        merak.stream_weights(model)

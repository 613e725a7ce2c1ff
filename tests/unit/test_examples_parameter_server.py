"""The parameter server's example: what its server does with the pushes of its workers."""

import importlib
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """The script as a module; scripts find their package demo beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("parameter_server")


def parameters():
    return {"weight": torch.nn.Parameter(torch.tensor([1.0, -2.0]))}


def test_gradients_are_steps_of_adagrad_in_the_order_of_pushes(example):
    served, plain = parameters(), parameters()
    server = example.ParameterServer(served, max_updates=3, learning_rate=0.1)
    optimizer = torch.optim.Adagrad(plain.values(), lr=0.1)
    for number in range(3):
        gradient = torch.tensor([0.5, number - 1.0])
        server.push(number % 2, number, {"weight": gradient})
        plain["weight"].grad = gradient
        optimizer.step()
    assert torch.equal(served["weight"], plain["weight"])
    assert not torch.equal(served["weight"], parameters()["weight"])


def test_what_is_pulled_stays_as_it_is_and_its_age_is_counted(example):
    served = parameters()
    server = example.ParameterServer(served, max_updates=9, learning_rate=0.1)
    version, pulled = server.pull()
    for worker in (0, 0, 1):  # the last computes on what all three have pulled
        server.push(worker, version, {"weight": torch.ones(2)})
    assert torch.equal(pulled["weight"], parameters()["weight"])
    assert server.staleness == {0: 1, 1: 1, 2: 1}
    assert server.pushes == {0: 2, 1: 1}
    assert server.pull()[0] == 3


def test_after_the_last_update_workers_stop_and_late_gradients_are_dropped(example):
    served = parameters()
    server = example.ParameterServer(served, max_updates=1, learning_rate=0.1)
    version, _ = server.pull()
    server.push(0, version, {"weight": torch.ones(2)})
    after = served["weight"].detach().clone()
    assert server.pull() is None
    server.push(1, version, {"weight": torch.ones(2)})
    assert torch.equal(served["weight"], after)
    assert server.pushes == {0: 1}


def test_one_process_is_told_how_to_start(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["parameter_server.py"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        example.main()
    assert "torchrun --nproc-per-node 4" in capsys.readouterr().err

"""Teachers inside the model that are averages of their students, against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from merak.core.errors import MerakError, TrainingError
from tests.multirank.ranks import RankPool, as_script
from tests.shared_cache import not_shared
from tests.tiers import slow
from tests.unit.graph.expert_models import SMALL

NUM_STEPS, BATCH, DECAY = 3, 8, 0.5


class Byol(nn.Module):
    """A student with a predictor, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.online = nn.Sequential(*(Block() for _ in range(3)))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.predictor(self.online(x)) - self.target(y)).square().mean()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Own(transformers.TrainerCallback):
    """Averages as scripts do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        average_by_hand(kwargs["model"])


def average_by_hand(model: nn.Module) -> None:
    followed = model.get_submodule("online").parameters()
    for mine, its in zip(model.get_submodule("target").parameters(), followed, strict=True):
        mine.data.mul_(DECAY).add_(its.data, alpha=1 - DECAY)


def average_by_name(model: nn.Module) -> None:
    import merak

    merak.average_teacher(model, "target", "online", DECAY)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def batch_of(step: int, rank: int = 0, count: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    columns = {name: torch.randn(BATCH, 8, generator=generator) for name in "xy"}
    return {name: column.chunk(count)[rank] for name, column in columns.items()}


Found = tuple[list[float], dict[str, torch.Tensor]]


def alone(average: Callable[[nn.Module], None]) -> Found:
    model, losses = Byol(), []
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    for step in range(NUM_STEPS):
        loss = model(**batch_of(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average(model)
        losses.append(loss.item())
    return losses, model.state_dict()


@as_script
@not_shared()
def trained(degrees: dict[str, int], by_hand: bool, options: dict[str, Any]) -> Found:
    import merak

    mesh = merak.init(device="cpu", **degrees)
    if options.pop("unlike", False):
        options["feature_dict"] = {"online.*.up": merak.Column(), "online.*.down": merak.Row()}
        options["feature_dict"] |= {"target.*": merak.Replicate()}
    model = Byol()
    example = batch_of(0, mesh.dp_rank, mesh.dp)
    parallel = merak.parallelize(model, example, optimizer=sgd, num_microbatches=2, **options)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(parallel.step(batch_of(step, mesh.dp_rank, mesh.dp)).item())
        (average_by_hand if by_hand else average_by_name)(model)
    return losses, parallel.gather_state_dict()


@pytest.mark.parametrize(
    ("degrees", "options", "by_hand"),
    [
        ({"pp": 2}, {}, False),
        slow({"tp": 2}, {}, True),
        slow({"dp": 2}, {"zero": 3}, False),
        slow({"dp": 2}, {"zero": 1}, True),
        slow({"pp": 2, "tp": 2}, {"unlike": True}, False),
        slow({"pp": 2, "dp": 2}, {"zero": 3}, False),
        slow({"pp": 2}, {"schedule": "chimera"}, False),
        slow({"pp": 2}, {"schedule": "pipedream_2bw"}, False),  # one update of both microbatches
    ],
)
def test_teachers_follow_as_in_one_process(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any], by_hand: bool
) -> None:
    size = int(torch.tensor(list(degrees.values())).prod())
    losses, weights = alone(average_by_hand)
    first, *others = pool.run(trained, size, degrees, by_hand, options)
    torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(losses))
    torch.testing.assert_close(first[1], dict(weights))
    assert all(other[0] == first[0] for other in others)


class Words(nn.Module):
    """A student and a teacher that are models of tokens, with experts or without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        if kind == "mixtral":
            config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
            self.online: nn.Module = transformers.MixtralModel(config)
        else:
            self.online = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        ahead = self.predictor(self.online(input_ids=x).last_hidden_state)
        behind = self.target(input_ids=y).last_hidden_state
        return {"loss": (ahead - behind).square().mean()}


def tokens_of(step: int, rank: int = 0, count: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    columns = {name: torch.randint(2, 40, (8, 8), generator=generator) for name in "xy"}
    return {name: column.chunk(count)[rank] for name, column in columns.items()}


def words_alone(kind: str) -> Found:
    model, losses = Words(kind), []
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    for step in range(NUM_STEPS):
        loss = model(**tokens_of(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average_by_hand(model)
        losses.append(loss.item())
    return losses, model.state_dict()


@as_script
def words_trained(kind: str, degrees: dict[str, int], zero: int) -> Found:
    import merak

    mesh = merak.init(device="cpu", **degrees)
    model, example = Words(kind), tokens_of(0, mesh.dp_rank, mesh.dp)
    parallel = merak.parallelize(model, example, optimizer=sgd, num_microbatches=2, zero=zero)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(parallel.step(tokens_of(step, mesh.dp_rank, mesh.dp)).item())
        average_by_name(model)
    return losses, parallel.gather_state_dict()


@pytest.mark.parametrize(
    ("kind", "degrees", "zero"),
    [
        slow("mixtral", {"dp": 2, "ep": 2}, 0),
        slow("mixtral", {"dp": 2, "ep": 2}, 3),
        slow("mixtral", {"tp": 2, "ep": 2}, 0),
        slow("llama", {"cp": 2}, 0),
    ],
)
def test_teachers_with_experts_and_shared_tokens_follow(
    pool: RankPool, kind: str, degrees: dict[str, int], zero: int
) -> None:
    size = math.prod(degree for axis, degree in degrees.items() if axis != "ep")
    losses, weights = words_alone(kind)
    first, *_ = pool.run(words_trained, size, kind, degrees, zero)
    torch.testing.assert_close(first[0], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first[1], dict(weights), rtol=1e-4, atol=1e-6)


def late_updates(stage_of: dict[str, int]) -> Found:
    """PipeDream in one process: an update for each microbatch, of weights that are behind."""
    model, losses = Byol(), []
    named = dict(model.named_parameters())
    for step in range(NUM_STEPS):
        history = [{name: p.detach().clone() for name, p in named.items()}]
        columns = {name: column.split(2) for name, column in batch_of(step).items()}
        mean = 0.0
        for number in range(4):
            behind = {n: history[max(0, number - 1 + stage_of[n])][n] for n in named}
            known = {n: v.clone().requires_grad_(named[n].requires_grad) for n, v in behind.items()}
            batch = {name: parts[number] for name, parts in columns.items()}
            loss = torch.func.functional_call(model, known, kwargs=batch)["loss"]
            loss.backward()
            mean += loss.item() / 4
            new = {n: v.clone() for n, v in history[-1].items()}
            for name, value in known.items():
                if value.grad is not None:
                    new[name].sub_(value.grad, alpha=0.5)
            history.append(new)
        model.load_state_dict(history[-1])
        average_by_hand(model)
        losses.append(mean)
    return losses, model.state_dict()


@as_script
def trained_late() -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    import merak

    merak.init(device="cpu", pp=2)
    model, losses = Byol(), []
    parallel = merak.parallelize(
        model, batch_of(0), optimizer=sgd, num_microbatches=4, schedule="pipedream"
    )
    for step in range(NUM_STEPS):
        losses.append(parallel.step(batch_of(step)).item())
        average_by_name(model)
    return losses, parallel.gather_state_dict(), list(parallel.engine.parameters)


@pytest.mark.slow
def test_teachers_follow_students_that_are_updated_inside_a_step(pool: RankPool) -> None:
    ranks = pool.run(trained_late, 2)
    stages = {name: rank for rank, (_, _, names) in enumerate(ranks) for name in names}
    losses, weights = late_updates(stages)
    torch.testing.assert_close(ranks[0][0], losses)
    torch.testing.assert_close(ranks[0][1], dict(weights))


@as_script
def told(way: str, zero: int) -> str:
    """What a loop of one's own is told of parameters that are not here."""
    import merak

    merak.init(device="cpu", **({"dp": 2} if zero else {"pp": 2}))
    model = Byol()
    taken = list(model.parameters())
    parallel = merak.parallelize(model, batch_of(0), optimizer=sgd, zero=zero)
    parallel.step(batch_of(0))
    assert [(p.shape, p.requires_grad) for p in taken] == [
        (p.shape, p.requires_grad) for p in Byol().parameters()
    ]
    try:
        if way == "before":
            sum(parameter.norm() for parameter in taken).item()  # type: ignore[union-attr]
        elif way == "submodule":
            [parameter.mean().item() for parameter in model.get_submodule("online").parameters()]
        elif way == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            average_by_hand(model)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "zero"),
    [
        ("average", 0),
        slow("before", 0),
        slow("submodule", 0),
        slow("clipping", 0),
        slow("average", 3),
    ],
)
def test_parameters_that_are_elsewhere_are_not_read(pool: RankPool, way: str, zero: int) -> None:
    all_told = pool.run(told, 2, way, zero)
    lines = {"average": "mine.data.mul_", "before": ".item()", "submodule": ".mean().item()"}
    # One of the ranks may have all that it reads.
    assert any(all_told)
    for said in filter(None, all_told):
        assert said.startswith("this script ")
        assert lines.get(way, "clip_grad_norm_(model.parameters(), 1.0)") in said
        assert "merak.average_teacher" in said


@as_script
@not_shared()
def train_with_callback(kind: str, degrees: dict[str, int], folder: str) -> list[float] | str:
    import merak

    merak.init(device="cpu", **degrees)
    follower = merak.TeacherAverage("target", "online", lambda step: DECAY)
    try:
        return losses_of(
            merak.MerakTrainer, merak.MerakArguments, Own() if kind == "own" else follower, folder
        )
    except MerakError as error:
        return str(error)


def losses_of(
    trainer: Any, arguments: Any, callback: transformers.TrainerCallback, folder: str
) -> list[float]:
    data = [{"x": x, "y": y} for x, y in zip(batch_of(0)["x"], batch_of(0)["y"], strict=True)]
    args = arguments(
        output_dir=folder, max_steps=NUM_STEPS, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=2, learning_rate=0.5, optim="sgd", use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    made = trainer(model=Byol(), args=args, train_dataset=data, callbacks=[callback])
    made.train()
    return [log["loss"] for log in made.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        slow("named", {"pp": 2}),
        slow("own", {"tp": 2}),
    ],
)
def test_callbacks_average_teachers(
    pool: RankPool, tmp_path: Any, kind: str, degrees: dict[str, int]
) -> None:
    args = transformers.TrainingArguments
    expected = losses_of(transformers.Trainer, args, Own(), str(tmp_path / "alone"))
    for found in pool.run(train_with_callback, 2, kind, degrees, str(tmp_path / "run")):
        if kind == "own" and "pp" in degrees:
            assert isinstance(found, str)
            assert "a value that this rank does not have" in found
            assert "mine.data.mul_" in found
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

"""Optimizers of any class, and wherever a script makes them, against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError
from tests import optimizers
from tests.multirank.ranks import RankPool, as_script
from tests.tiers import slow
from tests.unit.graph.expert_models import build

WIDTH, NUM_STEPS = 16, 3
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x - y) ** 2).mean()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for n in "xy"}


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters in groups by their names."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if ("bias" in n) is is_bias], "lr": lr}
        for is_bias, lr in ((True, 1e-3), (False, 1e-2))
    ]


def run_alone(
    make: Make, by_name: bool = False, num_steps: int = NUM_STEPS, one_batch: bool = False
) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(groups_of(model) if by_name else model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        model(**batch_of(0 if one_batch else step)).backward()
        optimizer.step()
    return model.state_dict()


def run_own(where: str, degrees: dict[str, int], zero: int) -> dict[str, torch.Tensor] | str:
    """Train by an optimizer that a script makes by itself; the parameters, or the refusal."""
    import merak

    mesh = merak.init(**degrees, device="cpu")

    def share(step: int) -> dict[str, torch.Tensor]:
        return {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(step).items()}

    model = make_model()
    earlier = adam(model.parameters())
    makers = {"factory": lambda _: adam(groups_of(model)), "earlier": earlier}
    parallel = merak.parallelize(
        model, share(0), optimizer=makers.get(where), zero=zero if mesh.dp > 1 else 0
    )
    optimizer = None
    if where == "before":
        optimizer = earlier
    elif where == "after":
        optimizer = adam(model.parameters())
    elif where == "engine":
        optimizer = adam(parallel.engine.parameters.values())
    if optimizer is not None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(NUM_STEPS):
        parallel.step(share(step))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return parallel.gather_state_dict()


def assert_equal(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


LAYOUTS = {
    "tp": ({"tp": 2}, 0),
    "zero1": ({"dp": 2}, 1),
    "zero3": ({"dp": 2}, 3),
    "pp": ({"pp": 2}, 0),
    "dp": ({"dp": 2}, 0),
}


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ("zero1", "before"),
        *(slow("zero1", where) for where in ("after", "engine", "factory", "earlier")),
        *(slow(layout, "earlier") for layout in ("tp", "zero3", "pp")),
        *(slow(layout, "factory") for layout in ("zero3", "dp")),
    ],
)
def test_an_optimizer_steps_what_it_means(pool: RankPool, layout: str, where: str) -> None:
    found = pool.run(run_own, 2, where, *LAYOUTS[layout])
    assert_equal(found[0], run_alone(adam, by_name=where == "factory"))


@as_script
def run_given(degrees: dict[str, int], zero: int, masters: bool, folder: str) -> dict[str, Any]:
    """Train by an optimizer and a schedule that a script gives to the trainer."""
    import merak

    mesh = merak.init(**degrees, device="cpu")
    model, columns = make_model(), batch_of(0)
    optimizer = adam(groups_of(model))
    trainer = merak.MerakTrainer(
        model=model,
        args=merak.MerakArguments(
            output_dir=folder,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=8 // mesh.dp,
            max_grad_norm=0.0,
            zero=zero,
            master_weights=masters,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{n: t[i] for n, t in columns.items()} for i in range(8)],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    return {n: torch.as_tensor(v) for n, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "masters"), [("pp", False), slow("zero1", False), slow("tp", True)]
)
def test_the_trainer_takes_an_optimizer_that_a_script_has_made(
    pool: RankPool, layout: str, masters: bool, tmp_path: Any
) -> None:
    found = pool.run(run_given, 2, *LAYOUTS[layout], masters, str(tmp_path))
    assert_equal(found[0], run_alone(adam, by_name=True, one_batch=True))


def muon(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return optimizers.Muon([p for p in parameters if p.dim() == 2], lr=0.02)


def torchs_muon(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)


def transformers_adafactor(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=True, beta1=0.9)


def of_each(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """LAMB whose code reads its norms, so that they are exchanged one by one."""

    class Reads(optimizers.Lamb):
        def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
            direction, norm = optimizers.adam(g, state), p.norm()
            return direction * (norm / direction.norm() if norm > 0 else 1.0)

    return Reads(parameters)


def one_bit_lamb(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    import merak

    return merak.OneBitLamb(parameters, lr=1e-2, warmup_steps=2, weight_decay=0.1)


def train_whole(
    make: Make, layouts: list[tuple[dict[str, int], int]], folder: str, bits: int = 64
) -> tuple[dict[str, torch.Tensor], float]:
    """Train three steps in each layout, every one from the checkpoint of the one before.

    Returns:
        The parameters, and the part of the optimizer's states that this rank has.
    """
    import merak
    from merak.core.mesh import reset

    for number, (degrees, zero) in enumerate(layouts):
        reset()
        mesh = merak.init(**degrees, device="cpu")

        def share(step: int, mesh: Any = mesh) -> dict[str, torch.Tensor]:
            whole = {n: t.to(DTYPES[bits]) for n, t in batch_of(step).items()}
            return {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in whole.items()}

        parallel = merak.parallelize(
            make_model().to(DTYPES[bits]),
            share(0),
            optimizer=make,
            zero=zero,
            master_weights=bits == 16,
        )
        if number:
            parallel.load_checkpoint(folder)
        for step in range(number * NUM_STEPS, (number + 1) * NUM_STEPS):
            parallel.step(share(step))
        parallel.save_checkpoint(folder)
    states = [] if parallel.optimizer is None else parallel.optimizer.state.values()
    held = sum(v.numel() for own in states for v in own.values() if isinstance(v, torch.Tensor))
    return parallel.gather_state_dict(), held / sum(p.numel() for p in make_model().parameters())


DTYPES = {64: torch.float64, 16: torch.bfloat16}


LAYOUTS |= {
    "zero2": ({"dp": 2}, 2),
    "tp_zero1": ({"tp": 2, "dp": 2}, 1),
    "tp_zero3": ({"tp": 2, "dp": 2}, 3),
    "tp_dp": ({"tp": 2, "dp": 2}, 0),
    "tp_pp": ({"tp": 2, "pp": 2}, 0),
    "ep": ({"dp": 2, "ep": 2}, 0),
    "ep_zero1": ({"dp": 4, "ep": 2}, 1),
}


def num_ranks(degrees: dict[str, int]) -> int:
    return math.prod(degree for axis, degree in degrees.items() if axis != "ep")


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (muon, "tp"),
        slow(torch.optim.Adafactor, "zero1"),
        slow(optimizers.Shampoo, "zero3"),
        *(slow(muon, layout) for layout in ("zero3", "pp", "tp_zero1", "tp_pp")),
        *(slow(torch.optim.Adafactor, layout) for layout in ("tp", "zero2", "tp_zero3")),
        (optimizers.Lamb, "tp_zero1"),
        *(slow(one, "tp_zero3") for one in (of_each, one_bit_lamb)),
        *(slow(optimizers.Lars, layout) for layout in ("tp", "zero1", "zero3", "tp_pp")),
        *(slow(optimizers.Lamb, layout) for layout in ("tp", "zero3", "tp_pp")),
        *(slow(torchs_muon, layout) for layout in ("tp", "zero1", "zero3", "tp_pp")),
        *(slow(transformers_adafactor, layout) for layout in ("tp", "zero1", "zero3", "tp_pp")),
        *(slow(one, "tp_zero1") for one in (optimizers.NovoGrad, optimizers.Came)),
    ],
)
def test_whole_parameters_are_stepped_as_in_one_process(
    pool: RankPool, make: Make, layout: str, tmp_path: Any
) -> None:
    degrees, zero = LAYOUTS[layout]
    path, folder = [(degrees, zero)], str(tmp_path / "saved")
    ranks = pool.run(train_whole, num_ranks(degrees), make, path, folder)
    assert_equal(ranks[0][0], run_alone(make))


def train_asynchronous(degrees: dict[str, int]) -> dict[str, torch.Tensor]:
    """Parameters after steps whose schedule updates stages inside, by norms."""
    import merak

    merak.init(**degrees, device="cpu")
    parallel = merak.parallelize(
        make_model(),
        batch_of(0),
        optimizer=optimizers.Lamb,
        num_microbatches=4,
        schedule="pipedream",
    )
    for step in range(NUM_STEPS):
        parallel.step(batch_of(step))
    return parallel.gather_state_dict()


@pytest.mark.slow
def test_norms_are_exchanged_inside_of_asynchronous_steps(pool: RankPool) -> None:
    whole, shards = (pool.run(train_asynchronous, 2 * tp, {"pp": 2, "tp": tp})[0] for tp in (1, 2))
    assert_equal(shards, whole)


def run_two(degrees: dict[str, int], zero: int) -> dict[str, torch.Tensor]:
    """A loop with an optimizer for matrices and one for all others."""
    import merak

    mesh = merak.init(**degrees, device="cpu")
    model = make_model()

    def share(step: int) -> dict[str, torch.Tensor]:
        return {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(step).items()}

    parallel = merak.parallelize(model, share(0), zero=zero)
    both = muon(model.parameters()), adam(p for p in model.parameters() if p.dim() < 2)
    for step in range(NUM_STEPS):
        parallel.step(share(step))
        for optimizer in both:
            optimizer.step()
    return parallel.gather_state_dict()


@pytest.mark.parametrize("layout", ["zero1", slow("tp")])
def test_one_optimizer_of_two_gets_whole_parameters(pool: RankPool, layout: str) -> None:
    model = make_model()
    both = muon(model.parameters()), adam(p for p in model.parameters() if p.dim() < 2)
    for step in range(NUM_STEPS):
        model.zero_grad()
        model(**batch_of(step)).backward()
        for optimizer in both:
            optimizer.step()
    assert_equal(pool.run(run_two, 2, *LAYOUTS[layout])[0], model.state_dict())


@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        slow(torch.optim.Adafactor, ["tp", "zero1"]),
        *(
            slow(make, ["zero1", "zero3", "pp", "tp"])
            for make in (torch.optim.Adafactor, optimizers.Lamb, optimizers.NovoGrad)
        ),
    ],
)
def test_states_of_whole_parameters_go_on_in_another_layout(
    pool: RankPool, make: Make, layouts: list[str], tmp_path: Any
) -> None:
    path = [LAYOUTS[layout] for layout in layouts]
    ranks = pool.run(train_whole, 2, make, path, str(tmp_path / "saved"))
    assert_equal(ranks[0][0], run_alone(make, num_steps=NUM_STEPS * len(layouts)))


@pytest.mark.slow
def test_owners_have_about_as_many_states(pool: RankPool, tmp_path: Any) -> None:
    parts = [held for _, held in pool.run(train_whole, 2, muon, [LAYOUTS["tp"]], str(tmp_path))]
    assert sum(parts) == pytest.approx(1.0, abs=0.1) and max(parts) < 0.6


@pytest.mark.parametrize("layouts", [slow(["tp", "zero1"])])
def test_masters_of_whole_parameters(pool: RankPool, layouts: list[str], tmp_path: Any) -> None:
    make, path = torch.optim.Adafactor, [LAYOUTS[layout] for layout in layouts]
    found = pool.run(train_whole, 2, make, path, str(tmp_path / "one"), 16)[0][0]
    dp = [LAYOUTS["dp"]] * len(layouts)
    expected = pool.run(train_whole, 2, make, dp, str(tmp_path / "other"), 16)[0][0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2**-6, atol=2e-3, msg=name)


def states_held(
    make: Make, degrees: dict[str, int], zero: int, bits: int = 32
) -> tuple[int, int, int]:
    """This rank's pp rank; bytes of states as forecast, and as they are after a step."""
    import merak
    from merak.data import signature
    from merak.engine.build import build_with_forecast
    from merak.graph.segment.build import GraphSource
    from merak.plan.engine_options import EngineOptions

    mesh = merak.init(**degrees, device="cpu")
    model = make_model() if mesh.ep == 1 else build("mixtral")
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    ids = torch.randint(2, 40, (4, 8), generator=torch.Generator().manual_seed(mesh.dp_rank))
    batch = {n: t.to(dtype) for n, t in batch_of(0).items()}
    batch = batch if mesh.ep == 1 else {"input_ids": ids, "labels": ids}
    sample = signature(batch).columns
    options = EngineOptions(
        num_microbatches=1, optimizer=make, zero=zero, master_weights=bits == 16
    )
    source = GraphSource(model.to(dtype))
    engine, forecast = build_with_forecast(source, sample, mesh, options)
    optimizer = make(engine.optimizer_params.named.values())
    engine.connect_optimizer(optimizer)
    engine.train_step(0, [sample], [batch], 1.0)
    optimizer.step()
    states = [v for own in optimizer.state.values() for v in own.values()]
    params = engine.optimizer_params
    ours = {id(item.tensor): item for item in params.items.values()}
    held = [s for s in states if isinstance(s, torch.Tensor)]
    held += [one for one in params.whole_tensors.values() if id(one) not in ours]
    held += [item.tensor for item in ours.values() if item.is_master]
    own = forecast.ranks(forecast.layout.plans.base.schedule)[mesh.pp_rank]
    storages = [tensor.untyped_storage() for tensor in held]  # ZeRO 3's shards share theirs
    real = sum({own.data_ptr(): own.nbytes() for own in storages}.values())
    return mesh.pp_rank, sum(stage.optimizer for stage in own.stages), real


@pytest.mark.parametrize(
    ("make", "layout", "bits"),
    [
        (torch.optim.Adafactor, "tp", 32),
        *(slow(optimizers.Lamb, layout, 32) for layout in ("tp", "zero3", "tp_zero1", "ep")),
        slow(optimizers.Shampoo, "ep_zero1", 32),
        slow(torch.optim.Adafactor, "tp_zero3", 16),
    ],
)
def test_whole_states_take_what_was_foreseen(
    pool: RankPool, make: Make, layout: str, bits: int
) -> None:
    """The forecast is that of the rank with most."""
    degrees, zero = LAYOUTS[layout]
    by_stage: dict[int, list[tuple[int, int]]] = {}
    for stage, *found in pool.run(states_held, num_ranks(degrees), make, degrees, zero, bits):
        by_stage.setdefault(stage, []).append((found[0], found[1]))
    for ranks in by_stage.values():
        assert {forecast for forecast, _ in ranks} == {max(real for _, real in ranks)}


def refusal_of(make: Make, degrees: dict[str, int], zero: int) -> str:
    import merak

    mesh = merak.init(**degrees, device="cpu")
    batch = {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(0).items()}
    with pytest.raises(merak.MerakError) as refused:
        merak.parallelize(make_model(), batch, optimizer=make, zero=zero)
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "layout", "message"),
    [
        (optimizers.Prodigy, "pp", r"Prodigy looks across all parameters .* \(pp=2\)"),
        (optimizers.StochasticRounding, "zero1", "it draws random numbers"),
        (optimizers.Sam, "pp", "Sam wants a closure that computes the loss anew"),
        (torch.optim.LBFGS, "dp", "LBFGS wants a closure that computes the loss anew"),
    ],
)
def test_what_would_train_something_else_is_refused(
    pool: RankPool, make: Make, layout: str, message: str
) -> None:
    import re

    for rank in pool.run(refusal_of, 2, make, *LAYOUTS[layout]):
        assert re.search(message, rank)


def step_a_copy() -> str:
    """A factory whose optimizer holds a copy of the model."""
    import merak

    merak.init(pp=1, device="cpu")
    model = make_model()
    other = copy.deepcopy(model)
    with pytest.raises(merak.MerakError) as refused:
        merak.parallelize(model, batch_of(0), optimizer=lambda _: adam(other.parameters()))
    return str(refused.value)


def test_an_optimizer_of_a_copy_is_refused(pool: RankPool) -> None:
    assert "no parameter of the model as it was given" in pool.run(step_a_copy, 1)[0]


@as_script
def step_by_hand() -> str:
    """What a loop hears that changes parameters by hand, where the optimizer steps others."""
    import merak

    mesh = merak.init(dp=2, device="cpu")
    batch = {n: t.chunk(2)[mesh.dp_rank] for n, t in batch_of(0).items()}
    parallel = merak.parallelize(make_model(), batch, zero=1)
    parallel.step(batch)
    try:
        for parameter in parallel.engine.parameters.values():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
    except TrainingError as error:
        return str(error)
    return ""


def test_a_loop_that_would_step_nothing_is_refused(pool: RankPool) -> None:
    for said in pool.run(step_by_hand, 2):
        assert said.startswith("this script reads the gradient of a parameter that the optimizer")
        assert "if parameter.grad is not None" in said
        assert "engine.optimizer_params.named" in said

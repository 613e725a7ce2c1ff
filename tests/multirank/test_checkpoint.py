"""Weights on real ranks: shared, created, written whole, saved in one layout, loaded in another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from merak.checkpoint.save_pretrained import save_pretrained
from merak.checkpoint.saver import save_state
from merak.checkpoint.state import RankState, load_state
from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.core.random import seed_for
from merak.core.shards import ParameterShard, take
from merak.core.start.init import init
from merak.graph.weights.empty_weights import empty_weights
from merak.graph.weights.materialize import materialize
from tests.multirank.ranks import RankPool
from tests.tiers import slow

CPU = torch.device("cpu")
LAYERS, HIDDEN, VOCABULARY = 4, 16, 61  # which tp does not divide
Layout = tuple[int, int, int]
"""(dp, tp, pp)."""


def gpt2() -> GPT2LMHeadModel:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **special, vocab_size=VOCABULARY))


def shards_of(tp: int) -> dict[str, ParameterShard]:
    """Megatron's layout, with query, key and value fused in one matrix."""
    if tp == 1:
        return {}
    shards = {"transformer.wte.weight": ParameterShard(0, (VOCABULARY,), tp)}
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}"
        shards |= {
            f"{prefix}.attn.c_attn.weight": ParameterShard(1, (HIDDEN,) * 3, tp),
            f"{prefix}.attn.c_attn.bias": ParameterShard(0, (HIDDEN,) * 3, tp),
            f"{prefix}.attn.c_proj.weight": ParameterShard(0, (HIDDEN,), tp),
            f"{prefix}.mlp.c_fc.weight": ParameterShard(1, (4 * HIDDEN,), tp),
            f"{prefix}.mlp.c_fc.bias": ParameterShard(0, (4 * HIDDEN,), tp),
            f"{prefix}.mlp.c_proj.weight": ParameterShard(0, (4 * HIDDEN,), tp),
        }
    return shards


def held_by(model: nn.Module, pp_rank: int, pp: int) -> list[str]:
    """Layers in equal stages; the embedding first, the norm and the tied head last."""

    def stage_of(name: str) -> int:
        if name.startswith("transformer.h."):
            return int(name.split(".")[2]) * pp // LAYERS
        return pp - 1 if "ln_f" in name or "lm_head" in name else 0

    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if stage_of(name) == pp_rank]


def laid_out(layout: Layout, model: nn.Module) -> tuple[Mesh, list[str], dict[str, ParameterShard]]:
    mesh = init(*layout, device="cpu")
    held, shards = held_by(model, mesh.pp_rank, mesh.pp), shards_of(mesh.tp)
    materialize(model, held, device=CPU, seed=3, shards=shards, shard_index=mesh.tp_rank)
    return mesh, held, shards


def part(
    whole: torch.Tensor, name: str, shards: Mapping[str, ParameterShard], mesh: Mesh
) -> torch.Tensor:
    return take(whole, shards[name], mesh.tp_rank) if name in shards else whole


def first_name(name: str) -> str:
    return "transformer.wte.weight" if name == "lm_head.weight" else name


# --- Values of rank 0
# --------------------------------------------------------------------------


def share(layout: Layout, seeds: list[int]) -> int:
    """Build a model from each rank's seed; returns how many tensors travelled."""
    torch.manual_seed(seeds[dist.get_rank()])
    model = gpt2()
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        mesh, held, shards = laid_out(layout, model)
    torch.manual_seed(seeds[0])
    for name, expected in gpt2().named_parameters(remove_duplicate=False):
        parameter = model.get_parameter(name)
        if parameter.is_meta:
            assert name not in held
            continue
        assert first_name(name) in map(first_name, held)
        assert torch.equal(parameter, part(expected, first_name(name), shards, mesh)), name
    return broadcast.call_count


@pytest.mark.parametrize("layout", [(1, 2, 2)])
def test_every_rank_gets_the_values_of_rank_0(pool: RankPool, layout: Layout) -> None:
    num_ranks = layout[0] * layout[1] * layout[2]
    counts = pool.run(share, num_ranks, layout, list(range(5, 5 + num_ranks)))
    assert len(set(counts)) == 1
    assert 0 < counts[0] < len(list(gpt2().parameters()))  # zeros and ones are equal already
    assert pool.run(share, num_ranks, layout, [5] * num_ranks) == [0] * num_ranks


def build_differently() -> str:
    torch.manual_seed(0)
    model = nn.Linear(3, 2 + dist.get_rank())
    with pytest.raises(WeightsError) as error:
        materialize(model, ["weight"], device=CPU, seed=0, shards={}, shard_index=0)
    return str(error.value)


def test_different_models_are_refused_on_every_rank(pool: RankPool) -> None:
    one, two = pool.run(build_differently, 2)
    assert one == two
    assert "bias is torch.float32 of shape (2,) on rank 0 and torch.float32 of shape (3,)" in one


# --- Created in parts, written whole -----------------------------------------------------------


def create_and_export(layout: Layout, folder: str, size: str) -> None:
    with empty_weights():
        model = gpt2()
    mesh, held, shards = laid_out(layout, model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (first_name(name) not in map(first_name, held)), name
    save_pretrained(model, held, shards, mesh, folder, size)


LAYOUTS: list[Layout] = [
    (1, 2, 2),
    (2, 2, 1),
    (1, 1, 4),
]


@pytest.mark.parametrize("layout", [x if x == (1, 2, 2) else slow(x) for x in LAYOUTS])
def test_every_layout_starts_from_and_writes_the_same_model(
    pool: RankPool, layout: Layout, tmp_path: Path
) -> None:
    with empty_weights():
        expected = gpt2()
    names = [name for name, _ in expected.named_parameters()]
    materialize(expected, names, device=CPU, seed=3, shards={}, shard_index=0)
    num_ranks = layout[0] * layout[1] * layout[2]
    pool.run(create_and_export, num_ranks, layout, str(tmp_path / "out"), "20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(saved, GPT2LMHeadModel)
    assert saved.lm_head.weight is saved.transformer.wte.weight
    assert saved.config.n_layer == LAYERS
    for name, value in expected.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name


class Normed(nn.Module):
    """A plain module whose buffers change where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)


def export_buffers(folder: str) -> None:
    mesh = init(1, 1, 2, device="cpu")
    model = Normed()
    prefix = ("first", "second")[mesh.pp_rank]
    held = [name for name in model.state_dict() if name.startswith(prefix)]
    parameters = [name for name in held if name in dict(model.named_parameters())]
    materialize(model, parameters, device=CPU, seed=0, shards={}, shard_index=0)
    getattr(model, prefix).running_mean.fill_(mesh.pp_rank + 1.0)
    save_pretrained(model, held, {}, mesh, folder)


def test_buffers_come_from_the_rank_that_uses_them(pool: RankPool, tmp_path: Path) -> None:
    pool.run(export_buffers, 2, str(tmp_path / "out"))
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state.keys() == Normed().state_dict().keys()
    assert state["first.running_mean"].tolist() == [1.0] * 3
    assert state["second.running_mean"].tolist() == [2.0] * 3


def export_to_a_bad_place(folder: str) -> str:
    mesh = init(1, 1, 2, device="cpu")
    model = gpt2()
    held = held_by(model, mesh.pp_rank, 2)
    with pytest.raises(WeightsError) as error:
        save_pretrained(model, held, {}, mesh, folder, "20KB")
    return str(error.value)


def test_when_rank_0_cannot_write_all_ranks_say_so(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    one, two = pool.run(export_to_a_bad_place, 2, str(tmp_path / "out"))
    assert one == two
    assert "out is a file" in one
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- Saved in one layout, loaded in another ----------------------------------------------------


def whole_gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed_for("gradient", name, step))
    return torch.randn(shape, generator=generator)


def optimizer_factory(kind: str, model: nn.Module, held: list[str]) -> Optimizer:
    parameters = {first_name(name): model.get_parameter(name) for name in held}
    decayed = [p for name, p in parameters.items() if p.dim() > 1]
    others = [p for name, p in parameters.items() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=0.01) if kind == "adamw" else Adafactor(groups, lr=0.01)


def steps(
    laid: tuple[Mesh, list[str], dict[str, ParameterShard]],
    model: nn.Module,
    optimizer: Optimizer,
    numbers: range,
) -> None:
    """Steps with gradients of the whole model that are known beforehand."""
    mesh, held, shards = laid
    shapes = {name: parameter.shape for name, parameter in gpt2().named_parameters()}
    for number in numbers:
        for name in {first_name(name) for name in held}:
            whole = whole_gradient(name, number, shapes[name])
            model.get_parameter(name).grad = part(whole, name, shards, mesh).contiguous()
        optimizer.step()


def values_of(
    laid: tuple[Mesh, list[str], dict[str, ParameterShard]], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Every number of this rank, by what it is and which part."""
    mesh, held, shards = laid
    values: dict[str, Any] = {}
    for name in {first_name(name) for name in held}:
        parameter = model.get_parameter(name)
        tensors = {"value": parameter.detach(), **optimizer.state[parameter]}
        index = mesh.tp_rank if name in shards else None
        values |= {(name, key, index): tensor.clone() for key, tensor in tensors.items()}
    return values


def save_in(layout: Layout, folder: str, kind: str) -> None:
    with empty_weights():
        model = gpt2()
    laid = laid_out(layout, model)
    mesh, held, shards = laid
    optimizer = optimizer_factory(kind, model, held)
    steps(laid, model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.003
    save_state(folder, RankState(model, optimizer, held, shards, mesh))


def load_in(layout: Layout, folder: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(17)
    model = gpt2()
    laid = laid_out(layout, model)
    mesh, held, shards = laid
    optimizer = optimizer_factory(kind, model, held)
    load_state(folder, RankState(model, optimizer, held, shards, mesh))
    steps(laid, model, optimizer, range(2, 4))
    return values_of(laid, model, optimizer)


def without_a_break() -> dict[str, Any]:
    """The same four steps in one process."""
    with empty_weights():
        model = gpt2()
    names = [name for name, _ in model.named_parameters()]
    materialize(model, names, device=CPU, seed=3, shards={}, shard_index=0)
    laid = (Mesh(1, 1, 1, 0, CPU, None), names, {})
    optimizer = optimizer_factory("adamw", model, names)
    steps(laid, model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.003
    steps(laid, model, optimizer, range(2, 4))
    return values_of(laid, model, optimizer)


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 2, 2), (1, 4, 1)),
        slow((1, 4, 1), (2, 1, 2)),
        slow((2, 2, 1), (1, 1, 2)),
    ],
)
def test_a_job_goes_on_in_another_layout(
    pool: RankPool, before: Layout, after: Layout, tmp_path: Path
) -> None:
    """Bit by bit: every parameter and optimizer state after two steps on either side."""
    folder = str(tmp_path / "state")
    pool.run(save_in, before[0] * before[1] * before[2], before, folder, "adamw")
    by_rank = pool.run(load_in, after[0] * after[1] * after[2], after, folder, "adamw")
    shards, expected = shards_of(after[1]), without_a_break()
    seen = set()
    for values in by_rank:
        for (name, key, index), value in values.items():
            whole = expected[name, key, None]
            sharded = index is not None and whole.dim() > 0
            assert torch.equal(value, take(whole, shards[name], index) if sharded else whole), name
            seen.add((name, key))
    assert seen == {(name, key) for name, key, _ in expected}


def load_and_fail(layout: Layout, folder: str) -> str:
    with pytest.raises(WeightsError) as error:
        load_in(layout, folder, "adafactor")
    return str(error.value)


def test_state_that_cannot_be_divided_needs_its_own_degree(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    pool.run(save_in, 2, (1, 2, 1), folder, "adafactor")
    pool.run(load_in, 4, (1, 2, 2), folder, "adafactor")
    one, two = pool.run(load_and_fail, 2, (1, 1, 2), folder)
    assert one == two
    assert "resume with the degree it was saved with" in one


def load_another_model_on_one_rank(folder: str) -> str:
    mesh = init(1, 1, 2, device="cpu")
    model = nn.Linear(3, 2 if mesh.rank == 0 else 3)
    with pytest.raises(WeightsError) as error:
        load_state(folder, RankState(model, None, ["weight"], {}, mesh))
    return str(error.value)


def save_linear(folder: str) -> None:
    save_state(
        folder, RankState(nn.Linear(3, 2), None, ["weight"], {}, init(1, 1, 2, device="cpu"))
    )


def test_a_rank_that_fails_takes_the_others_along(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    pool.run(save_linear, 2, folder)
    one, two = pool.run(load_another_model_on_one_rank, 2, folder)
    assert one == two
    assert "out_features is 2 in the checkpoint and 3 in the model" in one

"""Initial weights: created, read or broadcast, only on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from merak.core.errors import WeightsError
from merak.core.random import set_random_state
from merak.core.shards import ParameterShard, fill_up, take
from merak.core.storages import is_dense
from merak.graph.weights.absent import OF_OTHER_STAGE, AbsentTensor, swap
from merak.graph.weights.deferred_init import InitTape, replay
from merak.graph.weights.empty_weights import ORIGIN_ATTRIBUTE, InitOrigin, is_building, origin_of
from merak.graph.weights.holders import shard_shape
from merak.graph.weights.pretrained import CheckpointTensor
from merak.graph.weights.rank_agreement import broadcast_from_rank0

RandomInits = Mapping[tuple[InitTape, int], tuple[str, int]]
"""(tape, index of a record that draws) → (the parameter it is for, which of its draws it is)."""


@dataclass(frozen=True, slots=True)
class _Materializer:
    """Device, seed and random operators with which meta tensors are materialised.

    Args:
        device: where they are to be.
        seed: the job's seed.
        draws: what every draw is for.
    """

    device: torch.device
    seed: int
    draws: RandomInits


def materialize(
    model: nn.Module,
    names: Iterable[str],
    *,
    device: torch.device,
    seed: int,
    shards: Mapping[str, ParameterShard],
    shard_index: int,
) -> None:
    """Materialise a rank's parameters in place: real ones for `names`, meta ones otherwise.

    A parameter with numbers takes rank 0's, as in data parallel training. One that
    `merak.empty_weights` left without is read from the pretrained checkpoint, or initialised as
    its constructor would have done, every draw seeded by (seed, parameter name, index of the
    draw): all layouts start from the same weights. All ranks must call this together.

    Args:
        model: the user's model; its parameters are replaced under the same names.
        names: parameters that this rank holds; tied names stay one parameter.
        device: where parameters and buffers are to be.
        seed: the job's seed.
        shards: layouts of the parameters of which this rank holds a part.
        shard_index: which part it holds.

    Raises:
        WeightsError: a name that the model does not have, or a meta parameter of which
            the initial values are unknown.
    """
    if is_building():
        raise WeightsError("Weights are created after merak.empty_weights; leave its block first.")
    tied = names_of_parameters(model)
    wanted = set(names)
    known = {name for aliases in tied.values() for name in aliases}
    if wanted - known:
        raise WeightsError(f"The model has no parameter {sorted(wanted - known)[0]!r}.")
    broadcast_from_rank0(dict(_real_tensors(model)), device)
    maker = _Materializer(device, seed, _random_inits(model))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for parameter, aliases in tied.items():
            if wanted.isdisjoint(aliases):
                empty = torch.empty_like(parameter.data, device="meta")
                value: torch.Tensor = AbsentTensor(empty, f"{aliases[0]!r} is {OF_OTHER_STAGE}")
            else:
                shard = next((shards[name] for name in aliases if name in shards), None)
                value = _value(parameter, aliases[0], shard, shard_index, maker)
            _put(model, aliases, parameter, value)
        _materialize_buffers(model, maker)


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Names of every parameter of a model; several where it is tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _real_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        yield from ((name, t) for name, t in named if not t.is_meta and is_dense(t))


def _random_inits(model: nn.Module) -> RandomInits:
    """Keys of all random operators of the model, the same on every rank whatever it holds."""
    draws: dict[tuple[InitTape, int], tuple[str, int]] = {}
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            origin = origin_of(tensor)
            if origin is None:
                continue
            tape = origin.tape
            indices = [i for i in tape.needed(origin.view) if tape.operators[i].is_random]
            new = [i for i in indices if (tape, i) not in draws]
            draws.update(((tape, index), (name, count)) for count, index in enumerate(new))
    return draws


def _value(
    parameter: nn.Parameter,
    name: str,
    shard: ParameterShard | None,
    shard_index: int,
    maker: _Materializer,
) -> torch.Tensor:
    if shard is not None and not any(shard.sizes(shard_index)):  # another rank has all of it
        return parameter.data.new_empty(
            shard_shape(tuple(parameter.shape), shard, shard_index), device=maker.device
        )
    if shard is not None and parameter.is_meta:
        stored = _stored(_known_origin(parameter, name))
        if stored is not None:
            part = stored.read(shard.dim, shard.ranges(shard_index))
            return fill_up(part.to(maker.device, parameter.dtype), shard, shard_index)
    whole = parameter.data if not parameter.is_meta else _make(parameter, name, maker)
    if shard is not None:
        whole = take(whole, shard, shard_index)
    return whole.to(maker.device, parameter.dtype)


def _stored(origin: InitOrigin) -> CheckpointTensor | None:
    """Checkpoint tensor of a parameter, if no operator changed it after it was loaded."""
    needed = origin.tape.needed(origin.view)
    last = origin.tape.operators[needed[-1]] if needed else None
    if last is None or last.args[0] != origin.view or len(needed) > 1:
        return None
    return last.op if isinstance(last.op, CheckpointTensor) else None


def _make(tensor: torch.Tensor, name: str, maker: _Materializer) -> torch.Tensor:
    """Full value of a meta tensor."""
    origin = _known_origin(tensor, name)

    def before_draw(index: int) -> None:
        set_random_state(maker.device, maker.seed, "init", *maker.draws[origin.tape, index])

    return replay(origin.tape, origin.view, maker.device, before_draw)


def _known_origin(tensor: torch.Tensor, name: str) -> InitOrigin:
    origin = origin_of(tensor)
    if origin is None:
        raise WeightsError(
            f"{name}, of shape {tuple(tensor.shape)}, is on the meta device and nothing says how "
            "it is initialised; build the model under merak.empty_weights, or with real weights."
        )
    if not origin.tape.knows(origin.view):
        raise WeightsError(
            f"{name}, of shape {tuple(tensor.shape)}, is computed from a tensor on the meta device "
            "that was not made under merak.empty_weights; build this model normally."
        )
    return origin


def _put(
    model: nn.Module, names: list[str], old: nn.Parameter, value: torch.Tensor
) -> nn.Parameter:
    """Replace a parameter by a value, under all of its names."""
    if not value.is_meta and value.data_ptr() == old.data_ptr() and value.device == old.device:
        return old
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    kept = {k: v for k, v in old.__dict__.items() if k != ORIGIN_ATTRIBUTE or new.is_meta}
    new.__dict__.update(kept)
    if swap(old, new):
        return old
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, new)
    return new


def _materialize_buffers(model: nn.Module, maker: _Materializer) -> None:
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for path, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in moved:
                name = f"{path}.{attribute}".lstrip(".")
                real = _make(buffer, name, maker) if buffer.is_meta else buffer
                moved[buffer] = real.to(maker.device, buffer.dtype)
                kept = {k: v for k, v in vars(buffer).items() if k != ORIGIN_ATTRIBUTE}
                vars(moved[buffer]).update(kept)
            module._buffers[attribute] = moved[buffer]

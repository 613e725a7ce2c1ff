"""The state of any torch optimizer, by parameter name and as shards of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from merak.checkpoint.shards import Shards, TensorShard, row_shard_of, shard_of
from merak.core.errors import WeightsError
from merak.core.shards import OptimizerTensor
from merak.graph.weights.holders import RankView, full_shape

PREFIX = "optimizer/"
"""Keys are `optimizer/parameter name/optimizer's key`."""

MASTER = "merak-master"
"""The key of a parameter's float32 master, which the optimizer steps."""

AVERAGE = "merak-average"
"""The key of a parameter's moving average (`ema_decay`), one of the optimizer's own states."""

MARK = "@"
"""After the key of a tensor that cannot be resharded: the shard of its parameter."""


def hyperparameters(optimizer: Optimizer, view: RankView) -> dict[str, dict[str, Any]]:
    """Hyperparameters (learning rate, …) by parameter name, from the optimizer's groups."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found.update((_name(parameter, view), values) for parameter in group["params"])
    return found


def optimizer_values(optimizer: Optimizer, view: RankView) -> dict[str, dict[str, Any]]:
    """State of the optimizer that is no tensor, by parameter name and the optimizer's own key."""
    found: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        values = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        if values:
            found[_name(parameter, view)] = values
    return found


def optimizer_shards(optimizer: Optimizer, view: RankView) -> Shards:
    """Tensors of the optimizer's state for each parameter, to be saved.

    A tensor of the parameter's shape is sharded like it. One of another shape belongs to a shard of
    the parameter, and can only be loaded for the same shard. What a rank steps whole has its state
    as in one process.
    """
    state: Shards = {
        f"{PREFIX}{name}/{MASTER}": _shard(found.tensor, name, view)
        for name, found in _masters(view).items()
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(parameter, view)
            for key, value in optimizer.state.get(parameter, {}).items():
                full_key = f"{PREFIX}{name}/{key}"
                if not isinstance(value, torch.Tensor):
                    continue
                if name in view.whole:
                    state[full_key] = shard_of(value, None, 0)
                elif value.shape == parameter.shape:
                    state[full_key] = _shard(value, name, view)
                elif value.numel() <= 1 or name not in view.shards:
                    state[full_key] = shard_of(value, None, 0)
                else:
                    state[full_key + _shard_mark(name, view)] = shard_of(value, None, 0)
    return state


def optimizer_targets(
    optimizer: Optimizer, view: RankView, metadata: Metadata
) -> tuple[Shards, dict[str, torch.Tensor]]:
    """Empty tensors for the state that a checkpoint has of this optimizer's parameters.

    Returns:
        The shards to load, and the tensors that they are loaded into, both by key.

    Raises:
        WeightsError: state of a shard that this rank does not hold cannot be resharded.
    """
    names = {_name(p, view) for group in optimizer.param_groups for p in group["params"]}
    masters = _masters(view).keys()
    state: Shards = {}
    tensors: dict[str, torch.Tensor] = {}
    foreign: set[str] = set()
    for key, entry in metadata.state_dict_metadata.items():
        name, state_key = split_key(key)
        known = masters if state_key == MASTER else names
        if name not in known or not isinstance(entry, TensorStorageMetadata):
            continue
        if _is_foreign(key, tuple(entry.size), name, view):
            foreign.add(key)
        else:
            tensors[key], state[key] = _target(key, entry, name, view)
    for key in sorted(foreign):
        if split_key(key) not in map(split_key, state):
            raise WeightsError(
                f"{key.removeprefix(PREFIX)} of the optimizer has not the shape of its parameter "
                "and was saved under another tensor parallel degree, so it cannot be divided; "
                "resume with the degree it was saved with."
            )
    return state, tensors


_OF_SCHEDULES = frozenset(
    ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names")
)
"""Values in groups that are not options of the optimizer."""


def refuse_other_class(
    optimizer: Optimizer, values: Mapping[str, Any], metadata: Metadata, folder: object
) -> None:
    """Refuse a checkpoint whose optimizer states are another optimizer's, which would drop them.

    Args:
        optimizer: that is to go on.
        values: of the checkpoint.
        metadata: of its tensors.
        folder: of the checkpoint.

    Raises:
        WeightsError: it has states of a class with other options.
    """
    own = type(optimizer).__name__
    classes: Sequence[str] = values.get("optimizer_class", ())  # none in earlier checkpoints
    keys = {split_key(key)[1] for key in metadata.state_dict_metadata} - {"", MASTER, AVERAGE}
    keys |= {key for state in values["optimizer_values"].values() for key in state}
    if own in classes or not keys:
        return
    saved = {key for group in values["optimizer_groups"].values() for key in group}
    options = {key for group in optimizer.param_groups for key in group} - {"params"}
    missing = (saved - options) | ((options - saved) if classes else set())
    if missing - _OF_SCHEDULES:
        named = " and ".join(classes) or f"an optimizer with {', '.join(sorted(saved - options))}"
        raise WeightsError(
            f"{folder} has the states of {named} ({', '.join(sorted(keys))}), from which {own} "
            "cannot go on; resume with the optimizer that was saved, or start a new training from "
            "its weights (merak export)."
        )


def fill_optimizer(
    optimizer: Optimizer,
    view: RankView,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load state and hyperparameters into an optimizer.

    Args:
        optimizer: over parameters of the model.
        view: parameters of this rank, by name.
        tensors: of its state, by key.
        values: of its state that are no tensors, by parameter name.
        groups: hyperparameters by parameter name.

    Raises:
        WeightsError: its groups are not those that were saved.
    """
    loaded: dict[str, dict[str, Any]] = {name: dict(own) for name, own in values.items()}
    for key, value in tensors.items():
        name, state_key = split_key(key)
        if state_key != MASTER:
            loaded.setdefault(name, {})[state_key] = value
        elif view.optimizer_tensor(name).is_master:
            view.optimizer_tensor(name).tensor.detach().copy_(value)
    packed = optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    for packed_group, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        names = [_name(parameter, view) for parameter in group["params"]]
        packed_group.update(_common(names, groups))
        for number, name in zip(packed_group["params"], names, strict=True):
            if name in loaded:
                states[number] = loaded[name]
    optimizer.load_state_dict({**packed, "state": states})
    _restore_dtypes(optimizer, view, loaded)


def _masters(view: RankView) -> dict[str, OptimizerTensor]:
    """This rank's masters, or its rows of them; whoever steps them."""
    every = view.optimizer_tensors.items()
    return {name: own for name, own in every if own.is_master and own.tensor.numel()}


def _restore_dtypes(
    optimizer: Optimizer, view: RankView, values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Undo torch's cast of the state to the parameter's dtype where it was saved in another."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in values.get(_name(parameter, view), {}).items():
                now = state.get(key)
                if now is None:  # dropped as it was loaded
                    continue
                if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                    state[key] = value.to(now.device)


def _common(names: Sequence[str], groups: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Saved hyperparameters of a group, which all its parameters must agree on."""
    for name in names:
        if name not in groups:
            raise WeightsError(
                f"The optimizer trains {name}, but the one that was saved did not; resume with "
                "the same trainable parameters."
            )
        if groups[name] != groups[names[0]]:
            raise WeightsError(
                f"{names[0]} and {name} are in one group of the optimizer, but were saved from "
                "groups with other hyperparameters; resume with the same groups."
            )
    return groups[names[0]] if names else {}


def _target(
    key: str, entry: TensorStorageMetadata, name: str, view: RankView
) -> tuple[torch.Tensor, TensorShard]:
    parameter, shard = view.tensors[name], view.shards.get(name)
    size, dtype = tuple(entry.size), entry.properties.dtype
    is_whole = name in view.whole and split_key(key)[1] != MASTER
    if MARK not in key and not is_whole and size == full_shape(parameter, shard):
        shape = view.optimizer_tensor(name).tensor.shape
        # Zeros for the padding of a sharded vocabulary, which is not stored.
        tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return tensor, _shard(tensor, name, view)
    tensor = torch.empty(size, dtype=dtype, device=parameter.device)
    return tensor, shard_of(tensor, None, 0)


def _shard(value: torch.Tensor, name: str, view: RankView) -> TensorShard:
    """A tensor of an optimizer tensor's shape, as a shard of the whole."""
    shard, rows = view.shards.get(name), view.optimizer_tensor(name).rows
    if rows is None:
        return shard_of(value, shard, view.shard_index)
    return row_shard_of(value, rows, view.tensors[name], shard, view.shard_index)


def _is_foreign(key: str, size: tuple[int, ...], name: str, view: RankView) -> bool:
    """Whether a tensor belongs to a shard of its parameter that this rank does not hold."""
    shard = view.shards.get(name)
    if name in view.whole and split_key(key)[1] != MASTER:
        return MARK in key
    if MARK in key:
        return shard is None or not key.endswith(_shard_mark(name, view))
    whole = full_shape(view.tensors[name], shard)
    return shard is not None and size != whole and math.prod(size) > 1


def _shard_mark(name: str, view: RankView) -> str:
    return f"{MARK}{view.shard_index}of{view.shards[name].degree}"


def split_key(key: str) -> tuple[str, str]:
    """The parameter and the optimizer's own key; ("", "") for a key of something else."""
    if not key.startswith(PREFIX):
        return "", ""
    name, _, state_key = key.removeprefix(PREFIX).rpartition("/")
    return name, state_key.partition(MARK)[0]


def _name(parameter: torch.Tensor, view: RankView) -> str:
    name = view.names.get(id(parameter))
    if name is None:
        raise WeightsError(
            f"The optimizer has a parameter of shape {tuple(parameter.shape)} that the model does "
            "not have; build it over the parameters of the model."
        )
    return name

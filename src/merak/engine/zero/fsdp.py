"""FSDP parameters (ZeRO-3): sharded over the replicas, and gathered segment by segment.

torch's `fully_shard` does it: parameters that the same segments read are a module of their own,
whose forward is the segment. They are gathered for the segment's action, in the order of
`merak.engine.zero.unshard_order`, and freed when it ends; a backward reduce-scatters gradients.

A segment's backward ends behind its reduce-scatter: each group is a root, as the schedule calls
segments one by one, and torch waits for a root's reductions in the callback behind its backward.
Two open would need one communication context of torch's own for all groups: private, of another
form in torch 2.11 (one reduction) than in 2.13 (a list), and prefetching in an order of its own.
On CPUs torch reduces in the thread of the backward, whatever is asked for.

Source: arXiv:1910.02054 (ZeRO), section 5.3; arXiv:2304.11277 (FSDP), section 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from merak.core.gradients import is_low_precision
from merak.core.shards import RowShard
from merak.engine.comm.row_shards import rows_of
from merak.engine.tensors_by_name import ParamLeaves
from merak.engine.zero.unshard_order import Unshard, UnshardOrder
from merak.graph.weights.absent import OF_REPLICAS, AbsentTensor, swap

Outputs = tuple[torch.Tensor, ...]
Compute = Callable[[ParamLeaves], Outputs]
"""A segment, as a function of its parameters by name."""


class FsdpGroup(nn.Module):
    """Parameters that one all-gather unshards: of one type, and all trained or all frozen.

    Args:
        parameters: by name, unsharded.
        replicas: the mesh along dp.
        masters: whether shards of parameters of low precision are float32 masters of them.
        order: in which they are gathered, with the collectives that gather them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: DeviceMesh,
        masters: bool,
        order: UnshardOrder,
    ) -> None:
        super().__init__()
        first = next(iter(parameters.values()))
        self.trains, self.degree = first.requires_grad, replicas.size()
        self.index = replicas.get_local_rank()
        self.dtype = first.dtype
        has_masters = masters and self.trains and is_low_precision(first)
        self.reduce_dtype = torch.float32 if has_masters else self.dtype
        self.names = tuple(parameters)
        self.shards = nn.ParameterList(
            nn.Parameter(p.detach().to(self.reduce_dtype), requires_grad=self.trains)
            for p in parameters.values()
        )
        # Elements that a collective carries of a replica: its rows, as many as any replica has.
        self.num_elements = sum(
            -(-p.shape[0] // self.degree) * (p.numel() // max(p.shape[0], 1))
            for p in parameters.values()
        )
        self._shard(replicas, has_masters, order)

    def _shard(self, replicas: DeviceMesh, has_masters: bool, order: UnshardOrder) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if has_masters else None,
            reduce_dtype=torch.float32 if has_masters else None,
            cast_forward_inputs=False,
        )
        made: Any = fully_shard(self, mesh=replicas, reshard_after_forward=False, mp_policy=policy)
        # The loss is a mean over replicas already.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        count, of = order.count_collective, order.collectives
        made.set_custom_all_gather(_CountedCollective(of.all_gather, count))
        made.set_custom_reduce_scatter(_CountedCollective(of.reduce_scatter, count))
        if can_abort_step():
            made.set_reduce_scatter_unused_params(True)

    def forward(self, compute: Compute) -> Outputs:
        """Call a segment while the parameters are gathered."""
        return compute(dict(zip(self.names, self.shards, strict=True)))


class _CountedCollective:
    """A collective that is counted when it begins, in the form that `fully_shard` takes."""

    def __init__(
        self, collective: Callable[..., Any], count_collective: Callable[[], None]
    ) -> None:
        self._collective, self._count = collective, count_collective

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer to send or to receive."""
        return make_buffer(size, dtype, device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the collective."""
        work = self._collective(*args, **kwargs)
        self._count()
        return work


def make_buffer(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer that a collective sends or receives; tests let memory run out here."""
    return torch.empty(*size, dtype=dtype, device=device)


def can_abort_step() -> bool:
    """Whether this torch can reset a gathered segment in the middle of its backward."""
    needed = ("reset_iter_state", "set_reduce_scatter_unused_params")
    return all(hasattr(FSDPModule, name) for name in needed)


class ShardLeaf:
    """The leaf of a sharded parameter for tied gradients: it gives the shard of the gradient."""

    def __init__(self, shard: nn.Parameter) -> None:
        self._shard = shard

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient shard of this replica, along dim 0."""
        found: Any = self._shard.grad
        return None if found is None else found.to_local()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        assert value is None, "shards of gradients are only taken"
        self._shard.grad = value


class FsdpParameters:
    """The parameters of a rank's segments, sharded over its replicas.

    Args:
        segments: names of the parameters of each.
        parameters: by name, unsharded.
        replicas: by name, the mesh of the replicas that shard a parameter.
        masters: whether shards of parameters of low precision are float32 masters of them.
        shared: names of those whose gradients are collected from several segments.
        order: in which they are gathered.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        segments: Iterable[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
        replicas: Callable[[str], DeviceMesh],
        masters: bool,
        shared: Collection[str],
        order: UnshardOrder,
    ) -> None:
        self._shared = frozenset(shared)
        self.order = order
        self._modules: dict[str, FsdpGroup] = {}
        self._positions: dict[str, int] = {}
        self.meta_parameters: dict[str, nn.Parameter] = {}
        self.optimizer_tensors: dict[str, nn.Parameter] = {}
        self.leaves: dict[str, ShardLeaf] = {}
        for names in _group_by_readers(segments, parameters, replicas):
            own = {name: parameters[name] for name in names}
            self._add(own, FsdpGroup(own, replicas(names[0]), masters, order))
        for module in dict.fromkeys(self._modules.values()):
            _initialize(module)

    def _add(self, own: Mapping[str, nn.Parameter], module: FsdpGroup) -> None:
        for position, (name, parameter) in enumerate(own.items()):
            self._modules[name], self._positions[name] = module, position
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            absent = AbsentTensor(empty, f"{name!r} is {OF_REPLICAS}")
            made = nn.Parameter(absent, requires_grad=module.trains)
            vars(made).update(vars(parameter))  # what the model's code reads there
            self.meta_parameters[name] = parameter if swap(parameter, made) else made
            if module.trains:
                self.optimizer_tensors[name] = nn.Parameter(
                    self._shard_of(name).to_local().detach()
                )
                self.leaves[name] = ShardLeaf(self._shard_of(name))

    def _shard_of(self, name: str) -> Any:
        return self._modules[name].shards[self._positions[name]]

    def shard(self, name: str) -> torch.Tensor:
        """Parameter shard of this replica, along dim 0, in the dtype of its optimizer tensor."""
        found: torch.Tensor = self._shard_of(name).to_local().detach()
        return found

    def full(self, name: str) -> torch.Tensor:
        """A parameter unsharded, in its own type; all replicas call it together."""
        dtype = self.meta_parameters[name].dtype
        found: torch.Tensor = self._shard_of(name).full_tensor().detach().to(dtype)
        return found

    def _modules_of(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(self._modules[n] for n in names if n in self._modules))

    def rows(self, name: str) -> RowShard:
        """The rows of a parameter that this replica holds: torch's chunk."""
        count, module = self.meta_parameters[name].shape[0], self._modules[name]
        each = -(-count // module.degree)
        return RowShard(min(module.index * each, count), min((module.index + 1) * each, count))

    def start(self, unshards: Iterable[tuple[Sequence[str], bool]]) -> None:
        """Set the order of a step or an evaluation that begins.

        Args:
            unshards: names of the parameters of each, and whether their gradients are reduced.
        """
        self.order.start(Unshard(self._modules_of(names), back) for names, back in unshards)

    def begin(self, names: Sequence[str], drained: bool = False) -> None:
        """Gather the parameters of a segment that begins; see `UnshardOrder.begin`."""
        self.order.begin(self._modules_of(names), drained)

    def end(self, names: Sequence[str], drained: bool = False) -> None:
        """Free the parameters of a segment that has ended; see `UnshardOrder.end`."""
        self.order.end(self._modules_of(names), drained)

    def abort_step(self) -> None:
        """Abort the step: from the marked action on, only the collectives take part."""
        self.forget()
        self.order.rewind()

    def forget(self) -> None:
        """Free the gathered parameters and the gradients of a step that failed."""
        every: list[Any] = list(dict.fromkeys(self._modules.values()))
        for module in every if can_abort_step() else ():
            _clear_gradients(module)  # unsharded gradients, of a backward that has not ended
            module.reset_iter_state()
            _clear_gradients(module)

    def call(self, names: Sequence[str], weights: ParamLeaves, compute: Compute) -> Outputs:
        """Call a segment with its gathered parameters.

        Args:
            names: of the parameters that it reads.
            weights: parameters that are not sharded.
            compute: the segment.
        """
        unsharded = {name: weights[name] for name in names if name not in self._modules}
        with warnings.catch_warnings():
            # Nobody writes into outputs in place: other segments read detached leaves of them.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            return _call_nested(list(self._modules_of(names)), unsharded, compute)

    def take_gradients(self) -> None:
        """Move the shards of the gradients to the optimizer tensors.

        Those of tied parameters have theirs already.
        """
        for name, tensor in self.optimizer_tensors.items():
            leaf = self.leaves[name]
            if name not in self._shared:
                tensor.grad = leaf.grad
            leaf.grad = None

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Context in which a model has the parameters unsharded; what is written into them stays.

        All replicas call it together. Masters are not written: they are more precise.
        """
        full = {
            name: nn.Parameter(self.full(name), meta.requires_grad)
            for name, meta in self.meta_parameters.items()
        }
        replace_parameters(model, {id(self.meta_parameters[name]): p for name, p in full.items()})
        try:
            yield
        finally:
            replace_parameters(
                model, {id(p): self.meta_parameters[name] for name, p in full.items()}
            )
        for name, parameter in full.items():
            shard = self._shard_of(name).to_local().detach()
            if shard.dtype == parameter.dtype and shard.numel():
                rows = self.rows(name)
                shard.copy_(rows_of(parameter.detach(), rows.start, rows.stop))


def _clear_gradients(module: FsdpGroup) -> None:
    """Clear the gradients of a group's parameters, unsharded or shards."""
    for parameter in module.shards:
        parameter.grad = None


@torch.no_grad()
def _initialize(module: Any) -> None:
    """Run torch's lazy initialisation of a module, without which it resets none."""
    module(lambda shards: ())
    module.reshard()


def _group_by_readers(
    segments: Iterable[Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    replicas: Callable[[str], DeviceMesh],
) -> list[list[str]]:
    """Names of each group: of one type, read by the same segments, sharded by the same ranks."""
    readers: dict[str, list[int]] = {}
    for number, names in enumerate(segments):
        for name in dict.fromkeys(names):
            readers.setdefault(name, []).append(number)
    groups: dict[object, list[str]] = {}
    for name, numbers in readers.items():
        parameter = parameters[name]
        key = (tuple(numbers), parameter.dtype, parameter.requires_grad, id(replicas(name)))
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _call_nested(modules: list[FsdpGroup], known: ParamLeaves, compute: Compute) -> Outputs:
    if not modules:
        return compute(known)
    first, *others = modules
    made: Outputs = first(lambda shards: _call_nested(others, {**known, **shards}, compute))
    return made


def replace_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Replace some parameters of a model by others.

    Args:
        model: whose parameters they are.
        others: by id of those that they replace.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in others:
                module._parameters[name] = others[id(parameter)]

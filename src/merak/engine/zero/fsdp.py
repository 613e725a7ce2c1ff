"""Parameters of which each replica holds a share, and gathers them segment by segment.

torch's `fully_shard` does it: parameters that the same segments read are a module of their own,
whose forward is the segment. They are gathered when the segment's turn comes
(`merak.engine.zero.unshard_order` knows when), freed when it ends, and a backward reduces their
gradients to shares.

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
from merak.engine.zero.unshard_order import Unshard, UnshardOrder, gather, scatter

Outputs = tuple[torch.Tensor, ...]
Compute = Callable[[ParamLeaves], Outputs]
"""A segment, as a function of its parameters by name."""


class FsdpGroup(nn.Module):
    """Parameters that are gathered together: of one type, and all trained or all frozen.

    Args:
        parameters: by name, whole.
        replicas: the mesh along dp.
        masters: whether shares of parameters of low precision are float32 masters of them.
        begun: told of every collective.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: DeviceMesh,
        masters: bool,
        begun: Callable[[], None],
    ) -> None:
        super().__init__()
        first = next(iter(parameters.values()))
        self.trains, self.degree = first.requires_grad, replicas.size()
        self.dtype = first.dtype
        has_masters = masters and self.trains and is_low_precision(first)
        self.sums_dtype = torch.float32 if has_masters else self.dtype
        self.names = tuple(parameters)
        self.own = nn.ParameterList(
            nn.Parameter(p.detach().to(self.sums_dtype), requires_grad=self.trains)
            for p in parameters.values()
        )
        # What a collective carries of a replica: its rows, as many as any replica has.
        self.num_elements = sum(
            -(-p.shape[0] // self.degree) * (p.numel() // max(p.shape[0], 1))
            for p in parameters.values()
        )
        self._shard(replicas, has_masters, begun)

    def _shard(self, replicas: DeviceMesh, has_masters: bool, begun: Callable[[], None]) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if has_masters else None,
            reduce_dtype=torch.float32 if has_masters else None,
            cast_forward_inputs=False,
        )
        made: Any = fully_shard(self, mesh=replicas, reshard_after_forward=False, mp_policy=policy)
        # The loss is a mean over replicas already.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        made.set_custom_all_gather(_Told(gather, begun))
        made.set_custom_reduce_scatter(_Told(scatter, begun))
        if can_abort_step():
            made.set_reduce_scatter_unused_params(True)

    def forward(self, compute: Compute) -> Outputs:
        """Call a segment while they are whole."""
        return compute(dict(zip(self.names, self.own, strict=True)))


class _Told:
    """A collective that somebody is told of, in the form that `fully_shard` takes."""

    def __init__(self, collective: Callable[..., Any], begun: Callable[[], None]) -> None:
        self._collective, self._begun = collective, begun

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is sent, and for what comes."""
        return make_buffer(size, dtype, device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin it."""
        work = self._collective(*args, **kwargs)
        self._begun()
        return work


def make_buffer(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a collective sends, or what comes."""
    return torch.empty(*size, dtype=dtype, device=device)


def can_abort_step() -> bool:
    """Whether this torch can leave a gathered segment in its midst, and says what it then owes."""
    needed = ("reset_iter_state", "set_reduce_scatter_unused_params")
    return all(hasattr(FSDPModule, name) for name in needed)


class ShardLeaf:
    """A parameter in shares, as who collects its gradient sees it: the share of the gradient."""

    def __init__(self, share: nn.Parameter) -> None:
        self._share = share

    @property
    def grad(self) -> torch.Tensor | None:
        """This replica's rows of the gradient."""
        found: Any = self._share.grad
        return None if found is None else found.to_local()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        assert value is None, "shares of gradients are only taken"
        self._share.grad = value


class FsdpParameters:
    """The parameters of a rank's segments, in shares among its replicas.

    Args:
        segments: names of the parameters of each.
        parameters: those by name, whole.
        replicas: the mesh along dp.
        masters: whether shares of parameters of low precision are float32 masters of them.
        shared: names of those whose gradients are collected from several segments.
        order: when each is gathered.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        segments: Iterable[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
        replicas: DeviceMesh,
        masters: bool,
        shared: Collection[str],
        order: UnshardOrder,
    ) -> None:
        self._index, self._degree = replicas.get_local_rank(), replicas.size()
        self._shared = frozenset(shared)
        self.order = order
        self._modules: dict[str, FsdpGroup] = {}
        self._places: dict[str, int] = {}
        self.meta_parameters: dict[str, nn.Parameter] = {}
        self.optimizer_tensors: dict[str, nn.Parameter] = {}
        self.leaves: dict[str, ShardLeaf] = {}
        for names in _groups(segments, parameters):
            own = {name: parameters[name] for name in names}
            self._add(own, FsdpGroup(own, replicas, masters, order.begun))
        for module in dict.fromkeys(self._modules.values()):
            _introduce(module)

    def _add(self, own: Mapping[str, nn.Parameter], module: FsdpGroup) -> None:
        for place, (name, parameter) in enumerate(own.items()):
            self._modules[name], self._places[name] = module, place
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            self.meta_parameters[name] = nn.Parameter(empty, requires_grad=module.trains)
            if module.trains:
                self.optimizer_tensors[name] = nn.Parameter(self._share(name).to_local().detach())
                self.leaves[name] = ShardLeaf(self._share(name))

    def _share(self, name: str) -> Any:
        return self._modules[name].own[self._places[name]]

    def share(self, name: str) -> torch.Tensor:
        """This replica's rows of a parameter, in the type that is stepped."""
        found: torch.Tensor = self._share(name).to_local().detach()
        return found

    def _modules_of(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(self._modules[n] for n in names if n in self._modules))

    def rows(self, name: str) -> RowShard:
        """The rows of a parameter that this replica holds, which are torch's chunks."""
        count = self.meta_parameters[name].shape[0]
        each = -(-count // self._degree)
        return RowShard(min(self._index * each, count), min((self._index + 1) * each, count))

    def start(self, order: Iterable[tuple[Sequence[str], bool]]) -> None:
        """A step or an evaluation begins.

        Args:
            order: the names of the parameters of each, and whether their gradients are summed.
        """
        self.order.start(Unshard(self._modules_of(names), back) for names, back in order)

    def begin(self, names: Sequence[str], drained: bool = False) -> None:
        """The turn of a segment with these parameters begins; see `UnshardOrder.begin`."""
        self.order.begin(self._modules_of(names), drained)

    def end(self, names: Sequence[str], drained: bool = False) -> None:
        """It is over; see `UnshardOrder.end`."""
        self.order.end(self._modules_of(names), drained)

    def abort_step(self) -> None:
        """From the marked action on, the rest of the step counts for nothing."""
        self.forget()
        self.order.go_back()

    def forget(self) -> None:
        """Free what a step that failed has gathered, and drop its gradients."""
        every: list[Any] = list(dict.fromkeys(self._modules.values()))
        for module in every if can_abort_step() else ():
            _clear(module)  # whole gradients, of a backward that was left in its midst
            module.reset_iter_state()
            _clear(module)

    def call(self, names: Sequence[str], weights: ParamLeaves, compute: Compute) -> Outputs:
        """Call a segment in its turn.

        Args:
            names: of the parameters that it reads.
            weights: those that are not in shares.
            compute: the segment.
        """
        whole = {name: weights[name] for name in names if name not in self._modules}
        with warnings.catch_warnings():
            # Nobody writes into outputs in place: other segments read detached leaves of them.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            return _nested(list(self._modules_of(names)), whole, compute)

    def take_gradients(self) -> None:
        """Give the shares of the gradients to what the optimizer steps.

        Of parameters whose gradients are collected it has them already.
        """
        for name, tensor in self.optimizer_tensors.items():
            leaf = self.leaves[name]
            if name not in self._shared:
                tensor.grad = leaf.grad
            leaf.grad = None

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Inside, a model has the parameters whole; what is written into them is kept.

        Called alike on all replicas. Masters are not written: they know more than parameters do.
        """
        full = {
            name: nn.Parameter(
                self._share(name).full_tensor().detach().to(meta.dtype), meta.requires_grad
            )
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
            share = self._share(name).to_local().detach()
            if share.dtype == parameter.dtype and share.numel():
                rows = self.rows(name)
                share.copy_(rows_of(parameter.detach(), rows.start, rows.stop))


def _clear(module: FsdpGroup) -> None:
    """Forget the gradients of what is there now, whole parameters or shares."""
    for parameter in module.own:
        parameter.grad = None


@torch.no_grad()
def _introduce(module: Any) -> None:
    """Have torch make what it makes in a module's first forward, without which it resets none."""
    module(lambda own: ())
    module.reshard()


def _groups(
    segments: Iterable[Sequence[str]], parameters: Mapping[str, nn.Parameter]
) -> list[list[str]]:
    """Names of what can be gathered together: it is read by the same segments, and is alike."""
    readers: dict[str, list[int]] = {}
    for number, names in enumerate(segments):
        for name in dict.fromkeys(names):
            readers.setdefault(name, []).append(number)
    groups: dict[object, list[str]] = {}
    for name, numbers in readers.items():
        parameter = parameters[name]
        key = (tuple(numbers), parameter.dtype, parameter.requires_grad)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _nested(modules: list[FsdpGroup], known: ParamLeaves, compute: Compute) -> Outputs:
    if not modules:
        return compute(known)
    first, *others = modules
    made: Outputs = first(lambda own: _nested(others, {**known, **own}, compute))
    return made


def replace_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters into the places of some.

    Args:
        model: whose parameters they are.
        others: by id of those that go.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in others:
                module._parameters[name] = others[id(parameter)]

"""Parameters of which each replica holds a share, and gathers them segment by segment.

torch's `fully_shard` does it: the parameters of a segment are a module of their own, whose forward
is the segment. It gathers them before the segment's forward, recomputation and backward, frees them
afterwards, and reduces their gradients to shares. A parameter that several segments read stays
whole, since its gradient comes from all of them.

Source: arXiv:1910.02054 (ZeRO), section 5.3; arXiv:2304.11277 (FSDP), section 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from merak.core.shards import RowShare
from merak.engine.gradients import is_low_precision
from merak.engine.shares import rows_of

Leaves = Mapping[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Compute = Callable[[Leaves], Outputs]
"""A segment, as a function of its parameters by name."""


class _Gathered(nn.Module):
    """Parameters that are gathered together, of one type.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = tuple(parameters)
        self.own = nn.ParameterList(parameters.values())

    def forward(self, compute: Compute) -> Outputs:
        """Call a segment while they are whole."""
        return compute(dict(zip(self.names, self.own, strict=True)))


class Sharded:
    """The parameters of a rank's segments, in shares among its replicas.

    Args:
        segments: names of the parameters of each.
        parameters: those by name, whole.
        replicas: the mesh along dp.
        masters: whether shares of parameters of low precision are float32 masters of them.
    """

    def __init__(
        self,
        segments: Iterable[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
        replicas: DeviceMesh,
        masters: bool,
    ) -> None:
        self._index, self._degree = replicas.get_local_rank(), replicas.size()
        self._modules: dict[str, _Gathered] = {}
        self._places: dict[str, int] = {}
        self.hollow: dict[str, nn.Parameter] = {}
        self.stepped: dict[str, nn.Parameter] = {}
        for names in segments:
            for dtype in sorted({parameters[name].dtype for name in names}, key=str):
                own = {n: parameters[n] for n in names if parameters[n].dtype == dtype}
                self._add(own, replicas, masters)

    def _add(self, own: Mapping[str, nn.Parameter], replicas: DeviceMesh, masters: bool) -> None:
        dtype = next(iter(own.values())).dtype
        is_low = masters and is_low_precision(next(iter(own.values())))
        kept = {n: nn.Parameter(p.detach().float()) for n, p in own.items()} if is_low else own
        module = _Gathered(kept)
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if is_low else None,
            reduce_dtype=torch.float32 if is_low else None,
            cast_forward_inputs=False,
        )
        made: Any = fully_shard(module, mesh=replicas, reshard_after_forward=True, mp_policy=policy)
        # The loss is a mean over replicas already.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        for place, (name, parameter) in enumerate(own.items()):
            self._modules[name], self._places[name] = module, place
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            self.hollow[name] = nn.Parameter(empty)
            self.stepped[name] = nn.Parameter(self._share(name).to_local().detach())

    def _share(self, name: str) -> Any:
        return self._modules[name].own[self._places[name]]

    def rows(self, name: str) -> RowShare:
        """The rows of a parameter that this replica holds, which are torch's chunks."""
        shape = self.hollow[name].shape
        count = shape[0] if shape else 1
        each = -(-count // self._degree)
        return RowShare(min(self._index * each, count), min((self._index + 1) * each, count))

    def call(self, names: Sequence[str], weights: Leaves, compute: Compute) -> Outputs:
        """Call a segment with its parameters whole.

        Args:
            names: of the parameters that it reads.
            weights: those that are not in shares.
            compute: the segment.
        """
        modules = dict.fromkeys(self._modules[name] for name in names if name in self._modules)
        whole = {name: weights[name] for name in names if name not in self._modules}
        with warnings.catch_warnings():
            # Nobody writes into outputs in place: other segments read detached leaves of them.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            return _nested(list(modules), whole, compute)

    def take_part(self) -> None:
        """Gather for other replicas what a forward of theirs reads, without one here."""
        for module in dict.fromkeys(self._modules.values()):
            gathered: Any = module
            gathered.unshard()
            gathered.reshard()

    def take_gradients(self) -> None:
        """Give the shares of the gradients to what the optimizer steps."""
        for name, stepped in self.stepped.items():
            share = self._share(name)
            stepped.grad = None if share.grad is None else share.grad.to_local()
            share.grad = None

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Inside, a model has the parameters whole; what is written into them is kept.

        Called alike on all replicas. Masters are not written: they know more than parameters do.
        """
        full = {
            name: nn.Parameter(self._share(name).full_tensor().detach().to(hollow.dtype))
            for name, hollow in self.hollow.items()
        }
        replace_parameters(model, {id(self.hollow[name]): p for name, p in full.items()})
        try:
            yield
        finally:
            replace_parameters(model, {id(p): self.hollow[name] for name, p in full.items()})
        for name, parameter in full.items():
            if self.stepped[name].dtype == parameter.dtype and self.stepped[name].numel():
                rows = self.rows(name)
                self.stepped[name].detach().copy_(
                    rows_of(parameter.detach(), rows.start, rows.stop)
                )


def _nested(modules: list[_Gathered], known: Leaves, compute: Compute) -> Outputs:
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

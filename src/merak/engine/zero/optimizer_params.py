"""The tensors of a rank's optimizer: its parameters, float32 masters, or rows of either.

The optimizer is any of torch's or the user's own, over the tensors of `OptimizerParams.named`:

- the parameters themselves, without other options;
- with master_weights, float32 copies of parameters of a lower precision, which are rounded into the
  parameters after every step;
- with ZeRO, some rows of every parameter (or of its master) on each replica. Every rank has an
  optimizer state for its rows alone, and after a step the replicas all-gather them.

Source: arXiv:1710.03740 (mixed precision), section 3.1; arXiv:1910.02054 (ZeRO), sections 5.1, 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from merak.core.gradients import is_low_precision
from merak.core.shards import OptimizerTensor, RowShard
from merak.engine.comm.row_shards import rows_of, shard_rows
from merak.engine.zero.fsdp import FsdpParameters
from merak.engine.zero.param_all_gather import ParamAllGather
from merak.engine.zero.replica_groups import ReplicaGroups
from merak.graph.weights.sharded import may_be_written


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which a job reduces gradients and updates parameters.

    Args:
        masters: keep float32 masters of parameters of a lower precision.
        float32_gradients: reduce their gradients in float32, over microbatches and ranks.
    """

    masters: bool = False
    float32_gradients: bool = True

    def reduce_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The element type in which a parameter's gradients are reduced."""
        is_low = is_low_precision(parameter) and self.float32_gradients
        return torch.float32 if is_low else parameter.dtype


@dataclass(frozen=True, slots=True)
class OptimizerParam:
    """A parameter and its optimizer tensor on this rank.

    Args:
        parameter: the one that the stages compute with.
        tensor: the parameter itself, its master, or the rows of either that are this rank's.
        rows: which rows; None for the whole parameter.
    """

    parameter: nn.Parameter
    tensor: nn.Parameter
    rows: RowShard | None

    @property
    def is_master(self) -> bool:
        """Whether the optimizer tensor is a float32 copy, in memory of its own."""
        return self.tensor.dtype != self.parameter.dtype

    def own_rows(self) -> torch.Tensor:
        """The rows of the parameter that the optimizer tensor stands for, a view."""
        data = self.parameter.detach()
        if self.rows is None:
            return data
        return rows_of(data, self.rows.start, self.rows.stop)

    @torch.no_grad()
    def take_written(self) -> None:
        """Copy elements that were written into the parameter to its master.

        The master is more precise in all others, which are its own, rounded.
        """
        own, master = self.own_rows(), self.tensor.detach()
        update_master(master, master.to(own.dtype), own)


def update_master(master: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """Copy the written elements of a parameter to its float32 master."""
    torch.where(before == after, master, after.to(master.dtype), out=master)


class OptimizerParams:
    """This rank's trained parameters and their optimizer tensors.

    Args:
        parameters: this rank's parameters by name.
        groups: the replicas that share out the optimizer (ZeRO); None for a whole one on each rank.
        precision: in which gradients are reduced, and the optimizer steps.
        param_all_gather: gathers the rows that other replicas have updated.
        fsdp: the parameters that are sharded as well (ZeRO-3); None for none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: ReplicaGroups | None = None,
        precision: Precision | None = None,
        param_all_gather: ParamAllGather | None = None,
        fsdp: FsdpParameters | None = None,
    ) -> None:
        self._fsdp = fsdp
        self._groups = groups or ReplicaGroups()
        self._precision = precision or Precision()
        self._param_all_gather = param_all_gather
        self.parameters = parameters
        optimizer_params = {name: p for name, p in parameters.items() if p.requires_grad}
        self.items = {name: self._make(name, p) for name, p in optimizer_params.items()}
        # Whole parameters that an optimizer steps here in place of all ranks' pieces, by name.
        self.whole_tensors: dict[str, nn.Parameter] = {}
        self.start_step()

    @property
    def is_sharded(self) -> bool:
        """Whether each replica's optimizer has a shard of the parameters."""
        return self._groups.everyone is not None

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The optimizer tensors by the parameters' names, without empty ones."""
        return {name: item.tensor for name, item in self.items.items() if item.tensor.numel()}

    def by_id(self) -> dict[int, nn.Parameter] | None:
        """Optimizer tensors by id of their parameter; None where they are the parameters."""
        if not self.is_sharded:
            return None
        return {id(item.parameter): item.tensor for item in self.items.values()}

    def optimizer_tensors(self) -> dict[str, OptimizerTensor]:
        """Optimizer tensors with their rows, for checkpoints."""
        return {
            name: OptimizerTensor(item.tensor, item.rows, item.is_master)
            for name, item in self.items.items()
        }

    def _make(self, name: str, parameter: nn.Parameter) -> OptimizerParam:
        if self._fsdp is not None and name in self._fsdp.optimizer_tensors:
            return OptimizerParam(
                parameter, self._fsdp.optimizer_tensors[name], self._fsdp.rows(name)
            )
        masters = self._precision.masters
        rows = self._rows(name, parameter)
        low = is_low_precision(parameter)
        if rows is None and not (low and masters):
            return OptimizerParam(parameter, parameter, None)
        own = OptimizerParam(parameter, parameter, rows).own_rows()
        if low and masters:
            own = own.float()
        return OptimizerParam(parameter, nn.Parameter(own), rows)

    def _rows(self, name: str, parameter: nn.Parameter) -> RowShard | None:
        """The rows of a parameter that this replica steps; None for all."""
        group = self._groups.of(name)
        if group is None:
            return None
        return shard_rows(parameter, dist.get_world_size(group), dist.get_rank(group))

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """The replicas that share out a parameter's optimizer; None for this rank alone."""
        return self._groups.of(name)

    def start_step(self) -> None:
        """Prepare the parameters for the gradients of a step."""
        with torch._C.DisableTorchFunctionSubclass():  # which follows scripts, and takes its time
            for item in self.items.values():
                dtype = self._precision.reduce_dtype(item.parameter)
                for leaf in (item.parameter, item.tensor):
                    if leaf.grad is None:
                        leaf.grad_dtype = dtype

    def take_gradients(self, loss_scale: float | torch.Tensor = 1.0) -> None:
        """Move the reduced gradients to the optimizer tensors, in their type.

        A parameter that has been frozen since (`requires_grad_(False)`) gets none, so that no
        optimizer changes it.

        Args:
            loss_scale: the factor of the gradients, which are divided by it.
        """
        if self._fsdp is not None:
            self._fsdp.take_gradients()
        sources = [i.parameter if i.rows is None else i.tensor for i in self.items.values()]
        gradients = [source.grad for source in sources if source.grad is not None]
        if isinstance(loss_scale, torch.Tensor):
            factor = loss_scale.double().reciprocal().float()
            for low in filter(is_low_precision, gradients):  # float16 may not have the factor
                low.copy_(low.float() * factor)
            if others := [one for one in gradients if not is_low_precision(one)]:
                torch._foreach_mul_(others, factor)
        elif gradients and loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / loss_scale)
        gradients.clear()  # so that each goes as soon as it has been converted
        with torch._C.DisableTorchFunctionSubclass():
            for source, item in zip(sources, self.items.values(), strict=True):
                gradient, source.grad = source.grad, None
                if gradient is None or not item.tensor.numel() or not item.parameter.requires_grad:
                    continue
                item.tensor.grad_dtype = item.tensor.dtype
                item.tensor.grad = gradient.to(item.tensor.dtype)

    def clear_gradients(self) -> None:
        """Clear all gradients; an optimizer's step then changes nothing."""
        if self._fsdp is not None:
            self._fsdp.take_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            for item in self.items.values():
                item.parameter.grad = None
                item.tensor.grad = None
        self.start_step()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that the optimizer would step with, by the parameters' names."""
        found = ((name, item.tensor.grad) for name, item in self.items.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients of earlier microbatches, as `gradients` gave them, to those of a step."""
        for name, gradient in gradients.items():
            tensor = self.items[name].tensor
            if not self.items[name].parameter.requires_grad:  # it has been frozen since
                continue
            if tensor.grad is None:
                tensor.grad_dtype = tensor.dtype
                tensor.grad = gradient
            else:
                tensor.grad.add_(gradient)

    def take_written(self) -> None:
        """Take over what a script has written into parameters that have masters."""
        for item in self.items.values():
            is_here = item.is_master and not item.parameter.is_meta
            if is_here and may_be_written(item.parameter):
                item.take_written()

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Copy the optimizer tensors into the parameters; all replicas call it together."""
        for item in self.items.values():
            if item.is_master and not item.parameter.is_meta:
                item.own_rows().copy_(item.tensor)
        if self._param_all_gather is not None:
            self._param_all_gather.start()

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Context in which a model has its parameters unsharded; all replicas call it together."""
        self.wait()
        with self._fsdp.unsharded(model) if self._fsdp is not None else nullcontext():
            yield

    def wait(self) -> None:
        """Wait until the parameters are up to date with the other replicas' steps."""
        if self._param_all_gather is not None:
            self._param_all_gather.wait()


def norm_of_gradients(params: OptimizerParams) -> torch.Tensor:
    """The 2-norm of this rank's gradients, a scalar; not finite if one of them is not."""
    gradients = [item.tensor.grad for item in params.items.values()]
    own = [gradient.float() for gradient in gradients if gradient is not None]
    if not own:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(own))
    norm: torch.Tensor = torch.linalg.vector_norm(norms)
    return norm

"""The tensors of a rank's optimizer: its parameters, float32 masters, or rows of either.

The optimizer is any of torch's or the user's own, over the tensors of `OptimizerParams.named`:

- the parameters themselves, without other options;
- with master_weights, float32 copies of parameters of a lower precision, which are rounded into the
  parameters after every step;
- with ZeRO, some rows of every parameter (or of its master) on each replica. Every rank has an
  optimizer state for its rows alone, and after a step the replicas all-gather them;
- with offload_optimizer, copies of any of these in host memory, which may be stepped by
  `delayed_step`.

Source: arXiv:1710.03740 (mixed precision), section 3.1; arXiv:1910.02054 (ZeRO), sections 5.1, 5.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from merak.core.gradients import is_low_precision
from merak.core.shards import OptimizerTensor, RowShard
from merak.engine.comm.row_shards import rows_of, shard_rows
from merak.engine.zero.delayed_step import DelayedStep
from merak.engine.zero.fsdp import FsdpParameters
from merak.engine.zero.host_steps import Arrived, StepInParts
from merak.engine.zero.host_tensors import HostTensors
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
        leaf: has the reduced gradient, on the device.
        is_in_host: whether the optimizer tensor is in host memory.
    """

    parameter: nn.Parameter
    tensor: nn.Parameter
    rows: RowShard | None
    leaf: nn.Parameter
    is_in_host: bool = False

    @property
    def is_master(self) -> bool:
        """Whether the optimizer tensor is more precise than the parameter."""
        return self.tensor.dtype != self.parameter.dtype

    @property
    def is_copy(self) -> bool:
        """Whether its numbers are not those that the stages compute with, and so are copied."""
        return self.is_in_host or (self.is_master and not self.parameter.is_meta)

    def own_rows(self) -> torch.Tensor:
        """What the stages compute with of the optimizer tensor: rows of the parameter, a view.

        With ZeRO 3 it is the shard that replicas gather, which is as precise as the optimizer's.
        """
        if self.parameter.is_meta:
            return self.leaf.detach()
        data = self.parameter.detach()
        if self.rows is None:
            return data
        return rows_of(data, self.rows.start, self.rows.stop)

    @torch.no_grad()
    def take_written(self) -> None:
        """Copy elements that were written into the parameter to its master.

        The master is more precise in all others, which are its own, rounded.
        """
        master = self.tensor.detach()
        own = self.own_rows().to(master.device)
        update_master(master, master.to(own.dtype), own)

    @torch.no_grad()
    def add_written(self, sent: torch.Tensor) -> bool:
        """Add what was written into the parameter to its master, which has had an update since.

        Args:
            sent: what the parameter was before, in host memory.

        Returns:
            Whether anything was written.
        """
        master, own = self.tensor.detach(), self.own_rows().to(sent.device)
        if torch.equal(sent, own):
            return False
        written = master + own.to(master.dtype) - sent.to(master.dtype)
        torch.where(sent == own, master, written, out=master)
        return True


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
        host: has the optimizer tensors in host memory; None for those on the device.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: ReplicaGroups | None = None,
        precision: Precision | None = None,
        param_all_gather: ParamAllGather | None = None,
        fsdp: FsdpParameters | None = None,
        host: HostTensors | None = None,
    ) -> None:
        self._fsdp = fsdp
        self.host = host
        self._groups = groups or ReplicaGroups()
        self._precision = precision or Precision()
        self._param_all_gather = param_all_gather
        self.parameters = parameters
        optimizer_params = {name: p for name, p in parameters.items() if p.requires_grad}
        self.items = {name: self._make(name, p) for name, p in optimizer_params.items()}
        self._by_parameter = {id(item.parameter): item for item in self.items.values()}
        self._early: list[Arrived] = []
        self._by_tensor = {id(item.tensor): item for item in self.items.values()}
        self._sent: set[int] = set()
        # Of optimizers in host memory, those that may step some tensors while the backward runs.
        self.in_parts: list[StepInParts] = []
        self._steps_early: list[StepInParts] = []
        # Of those whose steps are delayed, whether they end while the backward runs.
        self.delayed: list[DelayedStep] = []
        self._ends_early = False
        self._is_behind = False
        # Whole parameters that an optimizer steps here in place of all ranks' pieces, by name.
        self.whole_tensors: dict[str, nn.Parameter] = {}
        self.start_step()

    @property
    def is_sharded(self) -> bool:
        """Whether each replica's optimizer has a shard of the parameters."""
        return self._groups.is_shared_out

    @property
    def of_copies(self) -> Collection[str]:
        """Names of the parameters of which the copies of a stage have different shards."""
        return self._groups.of_copies.keys()

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The replicas that share out the optimizer of parameters that are no experts."""
        return self._groups.everyone

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The optimizer tensors by the parameters' names, without empty ones."""
        return {name: item.tensor for name, item in self.items.items() if item.tensor.numel()}

    def by_id(self) -> dict[int, nn.Parameter] | None:
        """What receives a parameter's reduced gradient, by its id; None for the parameters."""
        if not self.is_sharded:
            return None
        return {id(item.parameter): item.leaf for item in self.items.values()}

    def optimizer_tensors(self) -> dict[str, OptimizerTensor]:
        """Optimizer tensors with their rows, for checkpoints."""
        return {
            name: OptimizerTensor(item.tensor, item.rows, item.is_master, item.is_in_host)
            for name, item in self.items.items()
        }

    def _make(self, name: str, parameter: nn.Parameter) -> OptimizerParam:
        rows, leaf = self._rows(name, parameter), parameter
        if self._fsdp is not None and name in self._fsdp.optimizer_tensors:
            rows, leaf = self._fsdp.rows(name), self._fsdp.optimizer_tensors[name]
        elif rows is not None:
            leaf = nn.Parameter(OptimizerParam(parameter, parameter, rows, parameter).own_rows())
        low = is_low_precision(leaf) and self._precision.masters
        dtype = torch.float32 if low else leaf.dtype
        if self.host is not None:
            return OptimizerParam(parameter, self.host.copy_of(leaf, dtype), rows, leaf, True)
        tensor = leaf if dtype == leaf.dtype else nn.Parameter(leaf.detach().to(dtype))
        return OptimizerParam(parameter, tensor, rows, leaf if rows is None else tensor)

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
        self._early.clear()  # of this step, if it has been aborted before
        self._sent.clear()
        for own in self.in_parts:
            own.forget()
        for delayed in self.delayed:
            delayed.come_last()
        self._ends_early = False
        with torch._C.DisableTorchFunctionSubclass():  # which follows scripts, and takes its time
            for item in self.items.values():
                dtype = self._precision.reduce_dtype(item.parameter)
                for leaf in (item.parameter, item.leaf, item.tensor):
                    if leaf.grad is None:
                        leaf.grad_dtype = dtype

    def begin_early_steps(self) -> None:
        """Let optimizers step what leaves early in this step, before its other gradients.

        Of a delayed step, the device gets what the backward reads no longer.
        """
        self._steps_early = [own for own in self.in_parts if own.begin()]
        self._ends_early = True

    def leave_early(self, final: Iterable[nn.Parameter]) -> None:
        """Begin to copy gradients to host memory that are final before the step's others.

        Args:
            final: parameters whose gradients are reduced, and need no scale.
        """
        assert self.host is not None
        leaving: list[tuple[nn.Parameter, torch.Tensor]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in final:
                item = self._by_parameter.get(id(parameter))
                if item is None or item.leaf.grad is None or not parameter.requires_grad:
                    continue
                if item.leaf.grad.is_sparse:
                    continue
                if self._steps_early and may_be_written(parameter):
                    item.take_written()
                leaving.append((item.tensor, item.leaf.grad.to(item.tensor.dtype)))
                item.leaf.grad = None
            arriving, arrive = self.host.copy_gradients(leaving)
        self._early += arriving
        for own in self._steps_early:
            own.add(arriving, arrive)
        # What a script has written is added to tensors that files have once all is stepped.
        in_files = self.host.file is not None
        items = [self._by_tensor[id(tensor)] for tensor, _ in leaving] if self._ends_early else []
        landing = [i.tensor for i in items if not (in_files and may_be_written(i.parameter))]
        for delayed in self.delayed:
            delayed.land_complete(landing)

    def take_gradients(self, loss_scale: float | torch.Tensor = 1.0) -> None:
        """Move the reduced gradients to the optimizer tensors, in their type.

        A parameter that has been frozen since (`requires_grad_(False)`) gets none, so that no
        optimizer changes it.

        Args:
            loss_scale: the factor of the gradients, which are divided by it.
        """
        if self._fsdp is not None:
            self._fsdp.take_gradients()
        sources = [item.leaf for item in self.items.values()]
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
        leaving: list[tuple[nn.Parameter, torch.Tensor]] = []
        for own in self._steps_early:
            own.join()  # before other tensors have gradients, which it would step as well
        self._steps_early = []
        with torch._C.DisableTorchFunctionSubclass():
            for source, item in zip(sources, self.items.values(), strict=True):
                gradient, source.grad = source.grad, None
                if gradient is None or not item.tensor.numel() or not item.parameter.requires_grad:
                    continue
                gradient = gradient.to(item.tensor.dtype)
                if item.is_in_host:
                    leaving.append((item.tensor, gradient))
                    continue
                item.tensor.grad_dtype = item.tensor.dtype
                item.tensor.grad = gradient
            if self.host is not None:
                self.host.take_gradients(leaving)
                self.host.wait()
                for tensor, gradient in self._early:
                    tensor.grad = gradient
                self._early.clear()

    def clear_gradients(self) -> None:
        """Clear all gradients; an optimizer's step then changes nothing."""
        if self._fsdp is not None:
            self._fsdp.take_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            for item in self.items.values():
                item.parameter.grad = None
                item.leaf.grad = None
                item.tensor.grad = None
        self.start_step()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that the optimizer would step with, by the parameters' names."""
        found = {name: item.tensor.grad for name, item in self.items.items()}
        present = {name: gradient for name, gradient in found.items() if gradient is not None}
        if self.host is None:
            return present
        return {name: own.clone() for name, own in present.items()}  # the next step's arrive there

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
        # Those that were stepped after they were looked at, or are being stepped.
        left = self._sent | self._pending()
        for item in self.items.values():
            if item.is_copy and id(item.tensor) not in left and may_be_written(item.parameter):
                item.take_written()

    def _pending(self) -> set[int]:
        """Ids of tensors with a delayed update that the device does not have yet."""
        return {id(tensor) for own in self.delayed for tensor in own.pending}

    def land(self, stepped: Sequence[nn.Parameter]) -> None:
        """Begin to copy tensors into the parameters whose delayed update is complete.

        Args:
            stepped: the tensors; what a script has written into parameters meanwhile is added.
        """
        host, items = self.host, [self._by_tensor[id(tensor)] for tensor in stepped]
        assert host is not None
        for item in items:
            if may_be_written(item.parameter) and item.add_written(host.sent(item.tensor)):
                host.stage(item.tensor, item.tensor)
        host.send_staged([(item.own_rows(), item.tensor) for item in items])
        self._sent.update(id(item.tensor) for item in items)

    def end_delay(self) -> None:
        """Complete the update that a step has delayed; all replicas call it together."""
        if self._is_behind:
            for own in self.delayed:
                own.finish()
            self.sync_model_params()
            self._is_behind = False

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Copy the optimizer tensors into the parameters; all replicas call it together."""
        if self.host is not None:
            there = self._sent | self._pending()
            self.send([i.tensor for i in self.items.values() if id(i.tensor) not in there])
            self._sent.clear()
            self.host.arrive()
            self._is_behind = self.host.delays
        for item in self.items.values():
            if item.is_copy and not item.is_in_host:
                item.own_rows().copy_(item.tensor)
        if self._param_all_gather is not None:
            self._param_all_gather.start()

    def send(self, stepped: Sequence[nn.Parameter], is_early: bool = False) -> None:
        """Begin to copy some stepped tensors in host memory into the parameters.

        Args:
            stepped: of them, a part of what `sync_model_params` copies.
            is_early: whether the device still computes, with other parameters than these.
        """
        assert self.host is not None
        items = [self._by_tensor[id(tensor)] for tensor in stepped if id(tensor) in self._by_tensor]
        self.host.send([(item.own_rows(), item.tensor) for item in items], is_early)
        self._sent.update(id(item.tensor) for item in items)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Context in which a model has its parameters unsharded; all replicas call it together."""
        self.wait()
        with self._fsdp.unsharded(model) if self._fsdp is not None else nullcontext():
            yield
        for item in self.items.values():
            if item.is_in_host and item.parameter.is_meta:  # a checkpoint may have been loaded
                shard, own = item.own_rows(), item.tensor.detach()
                pair = (shard, own) if item.is_master else (own, shard)
                pair[0].copy_(pair[1])

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

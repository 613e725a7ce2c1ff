"""What a rank's optimizer steps: its parameters, float32 masters of them, or its replica's share.

The optimizer is any of torch's or the user's own, over the tensors of `TrainedParameters.named`:

- parameters as they are, where nothing else is asked for;
- with masters, float32 copies of parameters of a lower precision, which are rounded back into them
  after every step;
- with a sharded optimizer, some rows of every parameter (or of its master) on each replica. Every
  rank has a state for its rows alone, and after a step the replicas give each other theirs.

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
from merak.core.shards import RowShare, Stepped
from merak.engine.comm.row_shards import rows_of, share_rows
from merak.engine.zero.fsdp import Sharded
from merak.engine.zero.param_all_gather import Arrivals


@dataclass(frozen=True, slots=True)
class Precision:
    """In which precision a job sums gradients and steps.

    Args:
        masters: keep float32 masters of parameters of a lower precision.
        float32_gradients: sum their gradients in float32, over microbatches and ranks.
    """

    masters: bool = False
    float32_gradients: bool = True

    def sums_of(self, parameter: torch.Tensor) -> torch.dtype:
        """What a parameter's gradients are summed in."""
        is_low = is_low_precision(parameter) and self.float32_gradients
        return torch.float32 if is_low else parameter.dtype


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter and what the optimizer steps for it on this rank.

    Args:
        parameter: what the stages compute with.
        stepped: the parameter itself, its master, or the rows of either that are this rank's.
        rows: which rows; None for the whole parameter.
    """

    parameter: nn.Parameter
    stepped: nn.Parameter
    rows: RowShare | None

    @property
    def is_master(self) -> bool:
        """Whether its numbers are not the parameter's own memory."""
        return self.stepped.dtype != self.parameter.dtype

    def own_rows(self) -> torch.Tensor:
        """The parameter's memory of what is stepped here."""
        data = self.parameter.detach()
        if self.rows is None:
            return data
        return rows_of(data, self.rows.start, self.rows.stop)


class TrainedParameters:
    """This rank's trained parameters, and what the optimizer steps for them.

    Args:
        parameters: this rank's parameters by name.
        group: the replicas among which steps are shared; None steps everything here.
        precision: in which gradients are summed, and the optimizer steps.
        arrivals: brings what the other replicas have stepped.
        sharded: the parameters that replicas hold in shares; None for none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None = None,
        precision: Precision | None = None,
        arrivals: Arrivals | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        self._sharded = sharded
        self._group = group
        self._degree = 1 if group is None else dist.get_world_size(group)
        self._index = 0 if group is None else dist.get_rank(group)
        self._precision = precision or Precision()
        self._arrivals = arrivals
        self.parameters = parameters
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.items = {name: self._make(name, p) for name, p in trained.items()}
        self.start_step()

    @property
    def is_sharded(self) -> bool:
        """Whether each replica steps a share."""
        return self._group is not None

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the parameters' names."""
        return {name: item.stepped for name, item in self.items.items() if item.stepped.numel()}

    def shares(self) -> dict[int, nn.Parameter] | None:
        """By id of a parameter what is stepped of it here; None where that is all of it."""
        if not self.is_sharded:
            return None
        return {id(item.parameter): item.stepped for item in self.items.values()}

    def stepped(self) -> dict[str, Stepped]:
        """What the optimizer steps, as checkpoints want to know it."""
        return {
            name: Stepped(item.stepped, item.rows, item.is_master)
            for name, item in self.items.items()
        }

    def _make(self, name: str, parameter: nn.Parameter) -> Trained:
        if self._sharded is not None and name in self._sharded.stepped:
            return Trained(parameter, self._sharded.stepped[name], self._sharded.rows(name))
        masters = self._precision.masters
        rows = share_rows(parameter, self._degree, self._index) if self.is_sharded else None
        low = is_low_precision(parameter)
        if rows is None and not (low and masters):
            return Trained(parameter, parameter, None)
        own = Trained(parameter, parameter, rows).own_rows()
        if low and masters:
            own = own.float()
        return Trained(parameter, nn.Parameter(own), rows)

    def start_step(self) -> None:
        """Gradients of a step are about to be summed."""
        for item in self.items.values():
            dtype = self._precision.sums_of(item.parameter)
            for leaf in (item.parameter, item.stepped):
                if leaf.grad is None:
                    leaf.grad_dtype = dtype

    def take_gradients(self, loss_scale: float = 1.0) -> None:
        """Give the final gradients to what is stepped, in the type that the optimizer expects.

        Args:
            loss_scale: what they were multiplied by, and are divided by now.
        """
        if self._sharded is not None:
            self._sharded.take_gradients()
        sources = [i.stepped if self.is_sharded else i.parameter for i in self.items.values()]
        gradients = [source.grad for source in sources if source.grad is not None]
        if gradients and loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / loss_scale)
        gradients.clear()  # so that each goes as soon as it has been converted
        for source, item in zip(sources, self.items.values(), strict=True):
            gradient, source.grad = source.grad, None
            if gradient is None or not item.stepped.numel():
                continue
            item.stepped.grad_dtype = item.stepped.dtype
            item.stepped.grad = gradient.to(item.stepped.dtype)

    def clear_gradients(self) -> None:
        """Forget all gradients; a step then leaves everything as it is."""
        if self._sharded is not None:
            self._sharded.take_gradients()
        for item in self.items.values():
            item.parameter.grad = None
            item.stepped.grad = None
        self.start_step()

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring what was stepped into the parameters; called alike on all replicas."""
        for item in self.items.values():
            if item.is_master and not item.parameter.is_meta:
                item.own_rows().copy_(item.stepped)
        if self._arrivals is not None:
            self._arrivals.start()

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Inside, a model has its parameters whole; called alike on all replicas."""
        self.wait()
        with self._sharded.whole(model) if self._sharded is not None else nullcontext():
            yield

    def wait(self) -> None:
        """Wait until the parameters are whole, with what other replicas have stepped of them."""
        if self._arrivals is not None:
            self._arrivals.wait()

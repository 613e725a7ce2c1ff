"""Which layouts an optimizer is right in, judged by what it does to small tensors.

A stage's optimizer has the parameters of its own segments; under tensor parallelism and ZeRO it has
shards of them. An update of each element by itself is right on both, and so is one that takes norms
of a whole parameter, if ranks reduce them. One that takes factors or blocks of it is right on whole
parameters alone, and one that looks across all parameters on no part of a model.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.errors import ArgumentsError
from merak.core.health.status import phase
from merak.engine.state import EngineState
from merak.graph.weights.holders import full_shape
from merak.plan.optimizer.findings import find
from merak.plan.optimizer.needs import Findings, Needs, merged_findings
from merak.plan.optimizer.small_tensors import JobTensor, job_tensor


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a job's optimizer class, agreed by its ranks.

    Args:
        name: of the class.
        findings: of a trial on each rank that has an optimizer; the worst.
        layout: degrees that cut parameters or share them out, for people to read.
        is_cut: whether ranks have shards of parameters.
        is_asynchronous: whether the schedule updates weights inside of a step.
    """

    name: str
    findings: Findings
    layout: str
    is_cut: bool
    is_asynchronous: bool = False

    @property
    def needs(self) -> Needs:
        """What it needs of parameters to be right in this layout."""
        return self.findings.needs if self.is_cut else Needs.SHARDS

    def refusal(self) -> str | None:
        """The sentence for an optimizer that would train something else; None for a right one."""
        found = self.findings
        where = f"in this layout ({self.layout}) each rank has a part of them"
        if found.closure:
            return closure_refusal(self.name)
        if found.across:
            return (
                f"{self.name} looks across all parameters (it steps one alone otherwise than "
                f"beside others), and {where}; use one that steps every parameter by itself, such "
                "as AdamW, or replicas alone (dp)."
            )
        if self.needs is Needs.WHOLE and self.is_asynchronous:
            return (
                f"{self.name} steps whole parameters, which ranks with shards of them "
                f"({self.layout}) would have to exchange inside of a step of an asynchronous "
                "schedule; use a synchronous one, such as '1f1b', or tp=1."
            )
        if found.unknown and self.is_cut:
            return (
                f"whether {self.name} steps shards of parameters as it steps whole ones cannot be "
                f"judged, since {found.unknown}, and {where}; use dp or pp alone (tp=1, zero=0), "
                "or another optimizer, such as AdamW."
            )
        return None

    def remark(self) -> str | None:
        """Remark on an optimizer that is allowed, for the job's summary; None for nothing."""
        if not self.findings.unknown:
            return None
        if self.findings.draws:
            return f"{self.name} draws random numbers, which differ by layout"
        return f"{self.name} could not be judged, since {self.findings.unknown}"


def judge(state: EngineState, optimizer: torch.optim.Optimizer | None) -> Judgement | None:
    """Judge the optimizers of all ranks, which call it together.

    Args:
        state: of this rank's engine.
        optimizer: of this rank's tensors; None for a rank without any.

    Returns:
        The same on all ranks; None where each has every parameter whole.
    """
    mesh, params = state.mesh, state.optimizer_params
    is_cut = params.is_sharded or mesh.shard_degree > 1
    if not is_cut and mesh.pp == 1:
        return None
    with phase("judging the optimizer"):
        own = None
        if optimizer is not None:
            own = find(optimizer, _job_tensors(state, optimizer), mesh.device)
        name = None if optimizer is None else type(optimizer).__name__
        everyone = state.gather((name, own), "the judgement of the optimizer by")
    found = [findings for _, findings in everyone if findings is not None]
    worst = merged_findings(found)
    degrees = (("tp", mesh.tp), ("pp", mesh.pp), ("ep", mesh.ep), ("zero", state.zero))
    layout = ", ".join(f"{n}={d}" for n, d in degrees if d > (n != "zero"))
    named = next((n for n, _ in everyone if n is not None), "no optimizer")
    schedule = state.plan_for.base.schedule
    return Judgement(named, worst, layout, is_cut, not schedule.is_synchronous)


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step computes the loss anew.

    Raises:
        ArgumentsError: its step must be given a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentsError(closure_refusal(type(optimizer).__name__))


def closure_refusal(name: str) -> str:
    """The sentence for an optimizer whose step computes the loss anew.

    Args:
        name: of its class.
    """
    return (
        f"{name} wants a closure that computes the loss anew in its step, and Merak has run "
        "forward and backward by then; use one that steps by the gradients it finds, such as AdamW."
    )


def _job_tensors(state: EngineState, optimizer: torch.optim.Optimizer) -> list[JobTensor]:
    """What an optimizer of this rank's tensors steps."""
    names = {id(item.tensor): name for name, item in state.optimizer_params.items.items()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if (name := names.get(id(tensor))) is not None:
                found.append(_job_tensor(state, name, number))
    return found


def _job_tensor(state: EngineState, name: str, group: int) -> JobTensor:
    item, shard = state.optimizer_params.items[name], state.base.shards.get(name)
    shape = full_shape(item.parameter, shard)
    sharers = None if item.rows is None else state.optimizer_params.group_of(name)
    replicas = 1 if sharers is None else dist.get_world_size(sharers)
    return job_tensor(shape, shard, replicas, group)

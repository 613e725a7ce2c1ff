"""A workload: the model of a job at any microbatch, and its segments on one rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.gradients import LOW_PRECISION
from merak.core.mesh import Mesh, among_replicas
from merak.core.start.device import device_or_cpu
from merak.core.tensor_meta import Signature
from merak.graph.chunked_loss import RankRewrite, with_chunked_loss
from merak.graph.context_parallel.apply import context_parallel
from merak.graph.expert_parallel.apply import with_experts
from merak.graph.float8 import with_float8
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.replicas import meets_replicas
from merak.graph.ir.structure import Structure, structure_of_graph
from merak.graph.segment.build import GraphSource
from merak.graph.segment.repeated import RepeatedGraphs
from merak.graph.tensor_parallel.apply import TensorParallel, tensor_parallel
from merak.graph.tensor_parallel.features import Features, given_plan
from merak.graph.trace.branches.flags import optional_parameters
from merak.plan.activations.forecast import Forecast
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.cost.optimizer_memory import OptimizerFactory, OptimizerMemories
from merak.plan.cost.segments.measured import MeasuredGraphs
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout
from merak.plan.memory.local_model import LocalModel
from merak.plan.options import ParallelOptions
from merak.plan.partition import Partition
from merak.plan.price.candidate import Candidate, Form
from merak.plan.step_plans import StepPlans

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Workload:
    """The model of a job, its batch and its optimizer: all of a job but its layout.

    Graphs and what follows from them are made when they are first asked for, and remembered.

    Args:
        source: the model, on meta in the type of its parameters, and how it is called.
        columns: the columns of a microbatch of so many samples.
        global_batch: samples of one step of the whole job.
        tokens_per_sample: tokens of a sample; 1 where samples have none.
        sequence: tokens of a sequence; None where there are none.
        optimizer: makes the optimizer; None forecasts no state.
        common: the options that all of its layouts have.
        features: tensor parallel attributes that override those derived from the model.
        kernels: which kernels it runs; Merak's own are the trace's operators, one by one.
        steps_beside_backward: as of `merak.plan.optimizer.home`: its loop clips no gradients, and
            leaves no step out.
        dp: the number of replicas that a model finds which meets others, where no layout is asked
            for: the one given, or that of all ranks.
    """

    source: GraphSource
    columns: Callable[[int], Signature]
    global_batch: int
    tokens_per_sample: int = 1
    sequence: int | None = None
    optimizer: OptimizerFactory | None = None
    common: ParallelOptions = field(default_factory=ParallelOptions)
    features: Features | None = None
    kernels: KernelChoice = field(default_factory=KernelChoice)
    steps_beside_backward: bool = False
    dp: int = 1
    _known: dict[Hashable, Any] = field(init=False, default_factory=dict)
    _traced: dict[int, RepeatedGraphs] = field(init=False, default_factory=dict)
    _parallel: dict[Form, TensorParallel] = field(init=False, default_factory=dict)
    _measured: MeasuredGraphs = field(init=False, default_factory=MeasuredGraphs)

    def with_compression(self, kind: str) -> Workload:
        """The same job with compressed gradients, of which no graph knows.

        Args:
            kind: the option `gradient_compression`.
        """
        made = replace(self, common=replace(self.common, gradient_compression=kind))
        made._traced, made._parallel, made._measured = self._traced, self._parallel, self._measured
        return made

    @property
    def model(self) -> nn.Module:
        """The model, on meta."""
        return self.source.model

    @property
    def device(self) -> torch.device:
        """Type of the devices, on which the choice of kernels depends."""
        return torch.device(self.source.device.type)

    @property
    def dtype(self) -> torch.dtype:
        """Type of most parameters."""
        sizes: dict[torch.dtype, int] = {}
        for parameter in self.model.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    @property
    def low_sums(self) -> bool:
        """Whether gradients are reduced in a lower precision, or no master is stepped with them.

        ZeRO 3 reduces gradients in the type that the optimizer steps.
        """
        exact = self.common.master_weights and self.common.float32_gradients
        parameters = (p for p in self.model.parameters() if p.requires_grad)
        return not exact and any(p.dtype in LOW_PRECISION for p in parameters)

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of mixed precision."""
        return self.source.autocast

    @property
    def is_optimizer_fused(self) -> bool:
        """Whether one kernel steps many parameters, as of torch's `fused=True`."""
        return bool(self.once("fused optimizer", self._is_optimizer_fused))

    def _is_optimizer_fused(self) -> bool:
        if self.optimizer is None:
            return True
        try:
            made = self.optimizer([nn.Parameter(torch.zeros(2, 2))])
        except Exception:  # of its own demands, which the forecast of its memory meets or reports
            return False
        return any(group.get("fused") for group in made.param_groups)

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Value that follows from the workload, computed when it is first asked for.

        Args:
            key: what it is, and all that it depends on besides.
            make: makes it.
        """
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    def graph(self, microbatch: int, dp: int | None = None) -> ModelGraph:
        """Graph of the whole model in training.

        Args:
            microbatch: samples of one microbatch.
            dp: the number of replicas that the model finds; None for that of the workload.

        Raises:
            TraceError: the model cannot be traced.
        """
        dp = self.dp if dp is None else dp

        def traced() -> ModelGraph | TraceError:
            if dp not in self._traced:
                self._traced[dp] = RepeatedGraphs(self.source, lambda b: dict(self.columns(b)))
            try:
                with among_replicas(dp):
                    return self._traced[dp](microbatch)
            except TraceError as error:  # which all layouts with so many replicas have
                return error

        found = self.once(("graph", microbatch, dp), traced)
        if isinstance(found, TraceError):
            raise TraceError(str(found)) from found
        return found

    def form(self, candidate: Candidate) -> Form:
        """Choices of a candidate that its graphs depend on.

        Args:
            candidate: how the job is laid out.

        Raises:
            TraceError: the model cannot be traced.
            ScheduleError: the schedule is not defined for these counts.
        """
        graph = partial(self.graph, candidate.microbatch)
        meets = self.once("meets replicas", lambda: meets_replicas(graph()))
        form = replace(candidate.form, dp=candidate.dp) if meets else candidate.form
        if not self.common.loss_chunk_bytes:
            return form
        return replace(form, one_pass=candidate.traits.holds_one_at_end)

    def mesh(self, form: Form) -> Mesh:
        """The mesh of a rank that runs graphs of a form, which are only planned.

        Args:
            form: the degrees.
        """
        dp = self.dp if form.dp is None else form.dp
        return Candidate(dp=dp, tp=form.tp, cp=form.cp, ep=form.ep).mesh(0, self.device)

    def drops_layers(self, microbatch: int) -> bool:
        """Whether a step may leave out layers, and with them gradients of their parameters.

        Args:
            microbatch: samples of one microbatch.
        """
        segments = self.graph(microbatch).segments
        return self.once(("drops", microbatch), lambda: any(map(optional_parameters, segments)))

    def local_graph(self, form: Form) -> ModelGraph:
        """Graph of the whole model as one rank runs it.

        Its `parameters` are the whole ones; those of the segments' placeholders are the rank's.

        Args:
            form: the microbatch, and the degrees that the graph depends on.

        Raises:
            ShardError: the degrees do not fit the model.
        """
        local = self.local_model(form)
        return self.once(("local", form), lambda: replace(local.graph, segments=local.segments))

    def local_model(self, form: Form) -> LocalModel:
        """The model as one rank runs it, with the memory of its segments.

        Args:
            form: as of `local_graph`.
        """

        def made() -> LocalModel:
            device = device_or_cpu(self.device)
            decay = self.common.ema_decay
            optimizers = self.once(
                "optimizers", lambda: OptimizerMemories(self.optimizer, device, decay)
            )
            graph, rewrite = self.graph(form.microbatch, form.dp), self.rewrite(form)
            ranks = (form.tp, form.cp, form.ep, form.dp)
            return LocalModel(graph, rewrite, device, optimizers, self._measured, ranks)

        return self.once(("model", form), made)

    def unique(self, form: Form) -> tuple[int, ...]:
        """For each segment of `local_graph`, the number of the first segment with an equal graph.

        Args:
            form: as of `local_graph`.
        """

        def numbers() -> tuple[int, ...]:
            first = dict[Structure, int]()
            segments = self.local_graph(form).segments
            return tuple(first.setdefault(structure_of_graph(s.graph), s.index) for s in segments)

        return self.once(("unique", form), numbers)

    def rewrite(self, form: Form) -> RankRewrite | None:
        """Rewriting of the model's segments into those of one rank; None where they are whole.

        Args:
            form: as of `local_graph`.

        Raises:
            ShardError: the degrees do not fit the model.
        """

        def made() -> RankRewrite | None:
            graph = self.graph(form.microbatch, form.dp)
            tensor = self.tensor_rewrite(form) if form.tp > 1 else None
            context = context_parallel(graph, tensor, form.cp) if form.cp > 1 else None
            capacity = self.common.expert_capacity
            experts = with_experts(graph, tensor, context, form.ep, capacity)
            layers = with_float8(experts, self.common.fp8, form.tp, form.cp)
            return with_chunked_loss(layers, self.common.loss_chunk_bytes, form.one_pass)

        return self.once(("rewrite", form), made)

    def tensor_rewrite(self, form: Form) -> TensorParallel:
        """Sharding of the model's weights over tensor parallel ranks.

        Args:
            form: as of `local_graph`; cp and one_pass do not matter.

        Raises:
            ShardError: the degrees do not fit the model.
        """
        form = replace(form, cp=1, one_pass=True)
        if form not in self._parallel:
            if form.sequence_parallel:  # of the same weights
                whole = self.tensor_rewrite(replace(form, sequence_parallel=False))
                own = replace(whole, sequence=True)
            else:
                features = given_plan(self.model) if self.features is None else self.features
                graph = self.graph(form.microbatch, form.dp)
                same = (
                    known.auto_sharder
                    for other, known in self._parallel.items()
                    if replace(other, ep=form.ep, sequence_parallel=False) == form
                )
                own = tensor_parallel(
                    graph, features, form.tp, ep=form.ep, auto_sharder=next(same, None)
                )
            self._parallel[form] = own
        return self._parallel[form]

    def plans(self, candidate: Candidate) -> StepPlans:
        """Schedule of a candidate, and every rank's steps.

        Raises:
            ScheduleError: the schedule is not defined for these counts.
        """
        name, options = candidate.schedule, candidate.schedule_options
        counts = (candidate.pp, candidate.num_microbatches)
        key = ("plans", name, *counts, str(sorted(options.items())))
        return self.once(key, lambda: StepPlans(name, *counts, chosen=options))

    def options(
        self,
        candidate: Candidate,
        memory_budget: int | None = None,
        device_profile: DeviceProfile | None = None,
    ) -> EngineOptions:
        """The engine's options of a candidate."""
        return EngineOptions(
            **self.common.priced(),
            **candidate.options(),
            num_microbatches=candidate.num_microbatches,
            optimizer=self.optimizer,
            memory_budget=memory_budget,
            device_profile=device_profile,
            recomputes_whole=self.kernels.recomputes_whole,
        )

    def forecast(
        self,
        candidate: Candidate,
        partition: Partition,
        memory_budget: int | None = None,
        device_profile: DeviceProfile | None = None,
    ) -> Forecast:
        """Forecast of a candidate's memory.

        Its activation policy is what the schedule saves; `resolve_activations` makes it that of
        the candidate.

        Args:
            candidate: how the job is laid out.
            partition: segments of every stage of its schedule.
            memory_budget: bytes that a rank may hold, for policies that fill the memory.
            device_profile: of the device, whose kernels' memory is counted; None for `device`'s.
        """
        mesh = candidate.mesh(0, self.device)
        form = self.form(candidate)
        layout = Layout(self.graph(form.microbatch, form.dp), partition, self.plans(candidate))
        local = self.local_model(form)
        options = self.options(candidate, memory_budget, device_profile)
        return Forecast(self.model, layout, mesh, local.rewrite, options, local)

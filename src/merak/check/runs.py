"""Training steps of a check: in one process with plain PyTorch, and on ranks through Merak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import PreTrainedModel

from merak.check.case import Case
from merak.check.float64 import computing_in
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.core.start.init import init
from merak.core.tensor_meta import TensorMeta
from merak.data import signature
from merak.engine import Engine, build_engine
from merak.graph.segment.build import GraphSource
from merak.graph.segment.observe import Observed, Observer
from merak.graph.trace.calls.call import Call, call_model
from merak.graph.weights.holders import named_tensors
from merak.parallel import ParallelModel
from merak.plan.cost.device import DeviceProfile, preset
from merak.plan.engine_options import EngineOptions
from merak.schedule.ir import USUAL

Tensors = dict[str, torch.Tensor]

Coordinates = tuple[int, int, int]
"""Coordinates of a rank: among replicas, tp, pp."""

LEARNING_RATE = 0.05
MOMENTUM = 0.9
BALANCED_FOR = "a100-80gb"
"""The device whose speeds decide which segments are a stage: the same on every machine."""

MAX_GRAD_NORM = 1.0
"""The norm that gradients are clipped to: deep models without it make chaos of any rounding."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of a checked job.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        cp: context parallel degree.
        ep: expert parallel degree: 1, tp or, with tp=1, a divisor of dp · cp.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Length and settings of the training of a check.

    Args:
        schedule: name of the pipeline schedule.
        num_microbatches: microbatches of a step of one replica.
        microbatch: samples of a microbatch.
        steps: optimizer steps.
        seed: of the weights and batches.
        device: where ranks compute; None takes what the machine has.
        backend: what carries tensors between ranks; None takes what fits the device.
        sequence_parallel: whether tensor parallel ranks hold shares of the sequence.
        evaluate: whether to evaluate before, between and after the steps as well.
    """

    schedule: str = USUAL
    num_microbatches: int = 4
    microbatch: int = 4
    steps: int = 3
    seed: int = 42
    device: str | None = None
    backend: str | None = None
    sequence_parallel: bool = False
    evaluate: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples in a step's batch of one replica."""
        return self.num_microbatches * self.microbatch


@dataclass(frozen=True, slots=True)
class Job:
    """Training job of a check.

    Args:
        case: the model and its batches.
        layout: the degrees.
        options: the settings of its training.
        dtype: floating point type of weights and inputs.
        ragged: whether the last evaluation batch has fewer samples than the others.
        partition: number of segments of every stage; None balances them.
        has_batched_experts: whether experts are computed by batched products, as in float64.
    """

    case: Case
    layout: Layout = field(default_factory=Layout)
    options: CheckOptions = field(default_factory=CheckOptions)
    dtype: torch.dtype = torch.float32
    ragged: bool = True
    partition: tuple[int, ...] | None = None
    has_batched_experts: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples in a step's batch, over all replicas."""
        return self.options.num_samples * self.layout.dp

    def model(self) -> nn.Module:
        """Build the model as training begins."""
        model = self.case.model(self.options.seed)
        is_batched = self.has_batched_experts or self.dtype == torch.float64
        if is_batched and isinstance(model, PreTrainedModel):
            model.set_experts_implementation("batched_mm")  # grouped products know no float64
        model._apply(self._converted)
        return model

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a weight to the requested type; `Module.to` would make complex ones real."""
        if tensor.is_complex():
            return tensor.to(self.dtype.to_complex())
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def batch(self, step: int, num_samples: int) -> Tensors:
        """Return the batch of all replicas for a step."""
        found = self.case.batch(step, num_samples)
        return {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in found.items()}

    def evaluation_batches(self) -> list[Tensors]:
        """Return the batches of an evaluation; the last one is smaller if the job is ragged."""
        most = self.options.microbatch
        sizes = (most, max(1, most - 1) if self.ragged else most)
        return [self.batch(self.options.steps + i, size) for i, size in enumerate(sizes)]

    def sample(self) -> dict[str, TensorMeta]:
        """Return the columns of a microbatch."""
        return dict(signature(self.batch(0, self.options.microbatch)).columns)

    def source(self, device: torch.device, cache: Path) -> GraphSource:
        """Return the model to be traced for a device, with a cache folder that ranks share."""
        model = self.model()
        case = self.case
        own = (case.loss_fn, case.loss_columns)
        example = self.batch(0, self.options.microbatch)
        return GraphSource(
            model, *own, fixed=case.fixed, device=device, cache_dir=cache, example=example
        )


@dataclass(slots=True)
class Outcome:
    """Losses, gradients, parameters and outputs of a training run on one process.

    Args:
        losses: of every step.
        gradients: of the first step, after clipping; parameters that got none are left out.
        parameters: after the last step.
        buffers: floating point ones, after the last step, as far as this process answers for them.
        evaluations: the model's outputs in evaluation, by what they are called in reports,
            as far as this process makes them.
        shards: how parameters lie over tp.
        place: which copy of the model the rank has a part of, which shard, and its pp coordinate.
        stage_sizes: number of segments of each of the rank's stages.
    """

    losses: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    evaluations: Tensors = field(default_factory=dict)
    shards: Mapping[str, ParameterShard] = field(default_factory=dict)
    place: Coordinates = (0, 0, 0)
    stage_sizes: Mapping[int, int] = field(default_factory=dict)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of both runs.

    It is linear in the gradients: one that divides by their magnitude, as Adam does, turns a
    gradient that is zero but for rounding into a whole step in a random direction.
    """
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def train_in_one_process(job: Job) -> Outcome:
    """Train in this process, in plain PyTorch.

    Args:
        job: what to train; batches of replicas are further microbatches. Replicas run at the same
            time: each starts from the buffers from before the step.
    """
    options = job.options
    model = job.model()
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(p for p in parameters.values() if p.requires_grad)
    outcome = Outcome()
    _evaluate_in_one_process(job, model, 0, outcome)
    for step in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        microbatches = _microbatches(job, step)
        before, after, total = _all_buffers(model), [], 0.0
        for number, microbatch in enumerate(microbatches):
            if number and number % options.num_microbatches == 0:
                after.append(_all_buffers(model))
                _set_buffers(model, before)
            with computing_in(job.dtype):
                loss = loss_of(job.case, model, microbatch) / len(microbatches)
            loss.backward()
            total += float(loss.detach())
        _join_replicas(model, [*after, _all_buffers(model)])
        nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
        if step == 0:
            outcome.gradients = _gradients(parameters)
        optimizer.step()
        outcome.losses.append(total)
        _evaluate_in_one_process(job, model, step + 1, outcome)
    outcome.parameters = {n: p.detach().clone() for n, p in parameters.items()}
    outcome.buffers = _buffers(model)
    return outcome


def _all_buffers(model: nn.Module) -> Tensors:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _set_buffers(model: nn.Module, values: Tensors) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _join_replicas(model: nn.Module, replicas: Sequence[Tensors]) -> None:
    """Set a model's buffers as `merak.engine.comm.replica_buffers` joins those of replicas."""
    if len(replicas) == 1:
        return
    means = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var")
    }
    joined = dict(replicas[0])
    for name in means & joined.keys():
        joined[name] = torch.stack([values[name] for values in replicas]).mean(0)
    _set_buffers(model, joined)


def loss_of(case: Case, model: nn.Module, microbatch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of a microbatch, as the user's own loop would.

    Raises:
        KeyError: the model returns no loss.
    """
    return _outputs_of(case, model, microbatch)["loss"]


def _outputs_of(case: Case, model: nn.Module, microbatch: Mapping[str, torch.Tensor]) -> Tensors:
    call = Call(tuple(microbatch), dict(case.fixed), case.loss_fn, case.loss_columns)
    return call_model(model, dict(microbatch), call)


@torch.no_grad()
def _evaluate_in_one_process(job: Job, model: nn.Module, num_steps: int, outcome: Outcome) -> None:
    if not job.options.evaluate:
        return
    model.eval()
    for number, batch in enumerate(job.evaluation_batches()):
        with computing_in(job.dtype):
            outputs = _outputs_of(job.case, model, batch)
        outcome.evaluations |= _named(outputs, num_steps, number)
    model.train()


def _evaluate_on_ranks(job: Job, engine: Engine, num_steps: int, outcome: Outcome) -> None:
    if not job.options.evaluate:
        return
    batches = job.evaluation_batches()
    signatures = [signature(batch).columns for batch in batches]
    with computing_in(job.dtype):
        for columns in signatures:
            engine.outputs(columns)  # traced now, if it has not been yet
        found = list(engine.evaluate(signatures, batches))
    for number, outputs in enumerate(found):
        outcome.evaluations |= _named(outputs, num_steps, number)


def _named(outputs: Mapping[str, torch.Tensor], num_steps: int, number: int) -> Tensors:
    """Rename outputs as reports name them, and copy them to the CPU."""
    when = f"of evaluation batch {number} after {num_steps} steps"
    return {f"{n} {when}": t.detach().to("cpu", copy=True) for n, t in outputs.items()}


def train_on_ranks(job: Job, cache: Path) -> Outcome:
    """Train through Merak; a collective of all ranks.

    Args:
        job: what to train.
        cache: folder in which ranks share the trace.

    Raises:
        MerakError: the model cannot be traced, or does not fit the degrees.
    """
    layout, options = job.layout, job.options
    mesh = _init(layout, options)
    parallel = _parallelize(job, mesh, cache)
    # Ranks with other experts are those of one copy of the model, as tensor parallel ranks are.
    outcome = Outcome(place=(mesh.expert_replicas_rank, mesh.shard_rank, mesh.pp_rank))
    _evaluate_on_ranks(job, parallel.engine, 0, outcome)
    for step in range(options.steps):
        with computing_in(job.dtype):  # inside of opaque modules
            outcome.losses.append(float(parallel.step(_replica_batch(job, mesh, step))))
        if step == 0:
            outcome.gradients = _gradients(parallel.engine.parameters)
        _evaluate_on_ranks(job, parallel.engine, step + 1, outcome)
    engine = parallel.engine
    outcome.parameters = {n: p.detach().cpu() for n, p in engine.parameters.items()}
    held = engine.held()
    outcome.buffers = {n: b for n, b in _buffers(parallel.model).items() if n in held}
    outcome.shards = dict(engine.shards)
    outcome.stage_sizes = engine.stage_sizes()
    return outcome


def _init(layout: Layout, options: CheckOptions) -> Mesh:
    degrees = (layout.dp, layout.tp, layout.pp)
    return init(
        *degrees,
        cp=layout.cp,
        ep=layout.ep,
        device=options.device,
        backend=options.backend,
    )


def observe_on_ranks(job: Job, cache: Path) -> tuple[Coordinates, Observed]:
    """Record outputs and gradients of this rank's operators in one step through Merak."""
    layout, options = job.layout, job.options
    mesh = _init(layout, options)
    observer = Observer()
    parallel = _parallelize(job, mesh, cache, observer)
    with computing_in(job.dtype):
        parallel.step(_replica_batch(job, mesh, 0))
    return (mesh.replicas_rank, mesh.tp_rank, mesh.pp_rank), observer.observed


def _microbatches(job: Job, step: int) -> list[Tensors]:
    """Cut the batch of all replicas for a step into microbatches, replica after replica.

    Samples of a check all have as many rows, such as patches of an image; so every column is cut.
    """
    batch = job.batch(step, job.num_samples)
    number = job.options.num_microbatches * job.layout.dp
    parts = {n: t.chunk(number) if t.ndim else [t] * number for n, t in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(number)]


def _replica_batch(job: Job, mesh: Mesh, step: int) -> list[Tensors]:
    """Return the microbatches of this rank's replica."""
    number = job.options.num_microbatches
    return _microbatches(job, step)[mesh.dp_rank * number :][:number]


def _parallelize(
    job: Job, mesh: Mesh, cache: Path, observer: Observer | None = None
) -> ParallelModel:
    """Parallelize the model as `merak.parallelize` does, with a trace that all ranks share."""
    source = job.source(mesh.device, cache)
    sample = tuple(job.sample().items())
    chosen = EngineOptions(
        schedule=job.options.schedule,
        num_microbatches=job.options.num_microbatches,
        seed=job.options.seed,
        sequence_parallel=job.options.sequence_parallel,
        partition=job.partition,
        device_profile=_balanced_for(),
        sub_pipelining="auto" if observer is None else "off",
        observer=observer,
    )
    with computing_in(job.dtype):  # a rank may find no trace that it could share
        engine = build_engine(source, sample, mesh, chosen)
    return ParallelModel(
        source.model, engine, chosen.num_microbatches, make_optimizer, MAX_GRAD_NORM
    )


def _balanced_for() -> DeviceProfile:
    """Speeds that balance the stages of a check; it fills no memory of the device they are of."""
    return replace(preset(BALANCED_FOR), memory_bytes=None, efficiency=None)


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    found = {name: p.grad for name, p in parameters.items()}
    return {name: g.detach().to("cpu", copy=True) for name, g in found.items() if g is not None}


def _buffers(model: nn.Module) -> Tensors:
    """Return the floating point buffers of checkpoints; others are constant tables."""
    saved = named_tensors(model)
    found = {n: b for n, b in model.named_buffers() if n in saved}
    return {n: b.detach().cpu() for n, b in found.items() if b.is_floating_point()}

"""Segments of a model at a batch's shapes: trace and cut, through the cache, in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.garbage import paused_collector
from merak.core.health.status import phase
from merak.core.rank0 import warn_once
from merak.core.storages import is_dense
from merak.core.tensor_meta import TensorMeta, known_masks
from merak.data.objects import OBJECTS, fitted
from merak.graph.cache.cache import Made, cached
from merak.graph.cache.called_functions import refuse_foreign_functions
from merak.graph.cache.fingerprint import fingerprint, loaded_sources
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.cut import cut_into_segments
from merak.graph.trace.branches.residual_blocks import Stacks, keeping_at_random
from merak.graph.trace.calls.call import Call, LossFunction, does_call_model
from merak.graph.trace.calls.eager_loss import is_eager
from merak.graph.trace.calls.exported import Exported
from merak.graph.trace.calls.further_calls import reads_other_shape
from merak.graph.trace.calls.host_reads import READ
from merak.graph.trace.modes.quiet_export import Warned, warned_once
from merak.graph.trace.opaque.operator import connect_modules
from merak.graph.trace.opaque.selection import OpaqueSelection
from merak.graph.trace.state.slots import Slot
from merak.graph.trace.trace import export_model, parameter_names, trace
from merak.graph.trace.traced import Trace
from merak.graph.weights.empty_weights import ORIGIN_ATTRIBUTE
from merak.graph.weights.laid_out import methods_allowed
from merak.graph.weights.rank_agreement import is_distributed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GraphSource:
    """Inputs of a trace but for shapes: the model, its loss, its options.

    Args:
        model: the user's model; its parameters may be on meta.
        loss_fn: `loss_fn(outputs, batch) -> loss`, where the model computes no loss itself.
        loss_columns: columns that go to the loss function alone, not to the model.
        fixed: keyword arguments of the model that are no tensors.
        device: device type the model will run on.
        cache_dir: where traces are stored; None for no cache.
        autocast: the type of mixed precision, as of `merak.graph.trace.trace.trace`.
        numbers: places of Python numbers that are inputs of the graph, by their column.
        dropped: blocks that are dropped by chance in training; None for those of the model's own.
        example: values of a batch, the same on all ranks, on which opaque modules are measured;
            none for made-up ones.

    It remembers which modules a trace runs as opaque modules, whether a forward leaves values that
    the next one may read, what traces have warned of, and the full shapes of parameters
    from when it is made: once the model is laid out over the ranks, it holds one rank's shard of
    them.
    """

    model: nn.Module
    loss_fn: LossFunction | None = None
    loss_columns: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = torch.device("cpu")
    cache_dir: Path | None = None
    autocast: torch.dtype | None = None
    numbers: dict[str, Slot] = field(default_factory=dict)
    dropped: Stacks | None = None
    example: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parameters: Mapping[str, TensorMeta] = field(init=False)
    opaque: OpaqueSelection = field(init=False, default_factory=OpaqueSelection)
    leaves: bool = field(init=False, default=False)
    warned: Warned = field(init=False, default_factory=Warned)

    def __post_init__(self) -> None:
        """Remember every parameter's full shape, by all of its names.

        Raises:
            TraceError: the model is a wrapper that trains over ranks or devices itself, a part of
                it is TorchScript, whose inside nothing can follow, or a
                parameter or buffer is of a class of tensor with code of its own, or a tensor that
                has to be saved is sparse.
        """
        _refuse_wrapper(self.model)
        _refuse_sparse(self.model)
        for path, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TraceError(
                    f"{path or 'the model'} is a {type(module).__name__} made by torch.jit; use "
                    "the module it was made from."
                )
        _refuse_tensor_classes(self.model)
        names, tied = parameter_names(self.model)
        whole = names | {other: names[first] for other, first in tied.items()}
        self.parameters = whole


_WRAPPERS = {
    "DistributedDataParallel": "the module inside it (its .module)",
    "DataParallel": "the module inside it (its .module)",
    "DeepSpeedEngine": "the module inside it (its .module)",
    "FullyShardedDataParallel": "the model before it was wrapped",
    "FSDPModule": "the model without fully_shard",
}
"""Classes that train a model over ranks or devices, and what to give Merak in their place."""


def _refuse_wrapper(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            instead = _WRAPPERS.get(cls.__name__)
            # A part in DataParallel runs as it is on one device, as parts of torchvision's do.
            if instead and not (path and cls is nn.DataParallel and len(module.device_ids) < 2):
                raise TraceError(
                    f"{path or 'the model'} is a {cls.__name__}, which shares out the work over "
                    f"devices or ranks itself; give Merak {instead}, whose work it shares out."
                )


_OF_ANY_CLASS = frozenset(vars(type("", (), {}))) | {"__slots__"}


def _refuse_tensor_classes(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        cls = type(tensor)
        own = [c for c in cls.__mro__[:-1] if c.__module__.partition(".")[0] != "torch"]
        if any(vars(base).keys() - _OF_ANY_CLASS for base in own):
            raise TraceError(
                f"{name} of {type(model).__name__} is a {cls.__name__}, a class of tensor with "
                "code of its own, such as packed weights, which ranks could not make again from "
                "its values; load the model without quantization (frozen base weights may be "
                "bfloat16), or hold the values in a plain tensor, and the rest in attributes of "
                "its module."
            )


def _refuse_sparse(model: nn.Module) -> None:
    """Refuse sparse tensors that an optimizer or a checkpoint would have.

    Raises:
        TraceError: there is one.
    """
    for path, module in model.named_modules():
        of_kinds = ("parameter", module._parameters), ("persistent buffer", module._buffers)
        for kind, slots in of_kinds:
            for name, tensor in slots.items():
                is_saved = name not in module._non_persistent_buffers_set
                if tensor is not None and not is_dense(tensor) and is_saved:
                    raise TraceError(
                        f"the {kind} {f'{path}.{name}'.lstrip('.')} is a sparse tensor, which "
                        "neither optimizers nor checkpoints of Merak can hold; train or save its "
                        "values, and register the tensor with register_buffer(…, "
                        "persistent=False), or make it dense."
                    )


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """Model graph, with the time it took and whether it came from the cache.

    Args:
        graph: the segments.
        cached: whether it was read from disk.
        trace_s: seconds that tracing took, or reading.
        shard_s: seconds that cutting took.
    """

    graph: ModelGraph
    cached: bool
    trace_s: float
    shard_s: float


def build_graph(
    source: GraphSource,
    columns: Mapping[str, TensorMeta],
    *,
    training: bool,
    copies_blocks: bool = False,
    earlier: Mapping[str, TensorMeta] | None = None,
) -> ModelGraph:
    """Model graph of a source at some shapes; see `build_timed`.

    Args:
        source: as of `build_timed`.
        columns: as of `build_timed`.
        training: as of `build_timed`.
        copies_blocks: as of `build_timed`.
        earlier: columns of a batch of another shape, behind which this one must compute the same.

    Raises:
        TraceError: as of `build_timed`, or it does not.
    """
    graph = build_timed(source, columns, training=training, copies_blocks=copies_blocks).graph
    own, before = (dict(known_masks(tuple(c.items()))) for c in (columns, earlier or {}))
    if source.leaves and before and before != own:
        with as_traced(source, training), phase("tracing batches of two shapes"):
            _check_shapes(source, own, before)
    return graph


def build_timed(
    source: GraphSource,
    columns: Mapping[str, TensorMeta],
    *,
    training: bool,
    copies_blocks: bool = False,
) -> BuiltGraph:
    """Model graph of a source at some shapes, traced or read from the cache, with timings.

    Args:
        source: the model, and what is called with it.
        columns: the batch at microbatch shape.
        training: train mode with the loss alone, or eval mode with all outputs.
        copies_blocks: as of `merak.graph.trace.trace.trace`.

    Returns:
        The segments, and the time they took.

    Raises:
        TraceError: the model cannot be traced, or gives no loss in training.
    """
    start = time.perf_counter()
    seconds = [0.0]

    def make() -> tuple[ModelGraph, Trace]:
        traced = trace_source(source, columns, copies_blocks)
        source.leaves |= traced.leaves
        traced_at = time.perf_counter()
        on_host = (name for name in traced.outputs if name.startswith(READ))
        graph = cut_into_segments(traced, outputs=("loss", *on_host) if training else None)
        if training:
            _check_loss(source.model, graph)
        seconds[0] = time.perf_counter() - traced_at
        return graph, traced

    def make_stored() -> Made:
        graph, traced = make()
        # What is warned of is warned of again in the next run, and on rank 0 whoever is first.
        is_of_one_run = traced.is_warned_of or traced.leaves or traced.is_of_replica
        return graph, None if is_of_one_run else traced.sources | loaded_sources(source.model)

    with as_traced(source, training), phase("tracing the model"), paused_collector():
        has_objects = any(meta.dtype is OBJECTS for meta in columns.values())
        is_of_one_run = does_call_model(source.loss_fn) or is_eager(source.loss_fn) or has_objects
        folder = None if is_of_one_run else source.cache_dir
        key = "" if folder is None else _key(source, columns, copies_blocks)
        if folder is None or not key:
            graph, known = make()[0], False
        else:
            graph, known = cached(folder, key, make_stored, partial(_adopt, source.model))
    total = time.perf_counter() - start
    return BuiltGraph(graph, known, total - seconds[0], seconds[0])


def _adopt(model: nn.Module, graph: ModelGraph) -> None:
    """Connect a graph read from disk to the model's code, and to no other."""
    refuse_foreign_functions(graph, model)
    connect_modules(graph, model)


def trace_source(
    source: GraphSource, columns: Mapping[str, TensorMeta], copies_blocks: bool = False
) -> Trace:
    """Trace a source's model; neither cut nor cached.

    Args:
        source: the model, and what is called with it; enter `as_traced` before.
        columns: the batch at microbatch shape.
        copies_blocks: whether calls of equal blocks are copied from the first.

    Raises:
        TraceError: the model cannot be traced, or returns no tensor.
    """
    traced = trace(
        source.model,
        columns,
        loss_fn=source.loss_fn,
        loss_columns=source.loss_columns,
        fixed=source.fixed,
        device=source.device,
        autocast=source.autocast,
        opaque=source.opaque,
        numbers=source.numbers,
        copies_blocks=copies_blocks,
        example=example_at(source.example, columns),
    )
    if not traced.outputs:
        raise TraceError(
            f"{type(source.model).__name__} returns no tensor for the columns "
            f"{', '.join(columns)}; return a loss, or a dict, tuple or dataclass of tensors."
        )
    return traced


def example_at(
    example: Mapping[str, torch.Tensor], columns: Mapping[str, TensorMeta]
) -> dict[str, torch.Tensor]:
    """Values of a batch of some shapes: those of an example, cut, or repeated, in each dim.

    Args:
        example: values, by column.
        columns: the batch; columns of another type or number of dims have no values.
    """
    found = {}
    for name, meta in columns.items():
        value = example.get(name)
        if value is None or value.dtype != meta.dtype or value.ndim != len(meta.shape):
            continue
        if 0 in value.shape:
            continue
        if meta.dtype is OBJECTS:
            found[name] = fitted(value, *meta.shape)
            continue
        for dim, size in enumerate(meta.shape):
            index = torch.arange(size) % value.shape[dim]
            value = value if size == value.shape[dim] else value.index_select(dim, index)
        found[name] = value
    return found


def call_of(source: GraphSource, columns: Mapping[str, TensorMeta]) -> Call:
    """The call of a source's model with a batch."""
    device, autocast = source.device.type, source.autocast
    return Call(
        tuple(columns),
        dict(source.fixed),
        source.loss_fn,
        source.loss_columns,
        None if autocast is None else partial(torch.autocast, device, autocast),
        numbers=source.numbers,
    )


def _check_shapes(
    source: GraphSource, columns: Mapping[str, TensorMeta], earlier: Mapping[str, TensorMeta]
) -> None:
    """Refuse a model whose forward leaves what changes a batch of another shape.

    Raises:
        TraceError: it does.
    """
    if list(columns) != list(earlier):
        return
    device = torch.device(source.device.type)

    def export(batches: Sequence[Mapping[str, TensorMeta]]) -> Exported:
        call = call_of(source, columns)
        return export_model(
            source.model, columns, call, device, opaque=source.opaque, batches=batches
        )

    try:
        found = reads_other_shape(export, columns, earlier, dict(source.model.named_buffers()))
    except TraceError as error:
        warn_once(logger, "Whether batches of other shapes change each other cannot be told (%s).",
                  error)  # fmt: skip
        return
    if found is not None:
        raise TraceError(
            f"forward keeps {found} from one batch to the next, and a batch behind one of another "
            "shape computes something else with that, so that losses depend on the order of "
            "batches, which a trace does not follow; compute it in each forward from its own "
            "batch, or pad all batches to one length."
        )


def _check_loss(model: nn.Module, graph: ModelGraph) -> None:
    loss = graph.values[str(graph.loss)]
    if loss.shape != ():
        raise TraceError(
            f"the loss of {type(model).__name__} has the shape {loss.shape}; return a single "
            "number, such as its mean."
        )
    if not loss.requires_grad:
        raise TraceError(
            f"the loss of {type(model).__name__} depends on no parameter that is trained; leave "
            "requires_grad on for some of them, and do not detach the loss."
        )


def _key(source: GraphSource, columns: Mapping[str, TensorMeta], copies_blocks: bool) -> str:
    numbers = tuple(source.numbers)
    for_planning = ("copies of blocks",) if copies_blocks else ()
    what = (
        numbers,
        source.loss_fn,
        source.loss_columns,
        source.fixed,
        source.device.type,
        source.autocast,
        str(source.dropped),
        is_distributed(),  # where models may leave out, or may not, what communicates
        *for_planning,
    )
    return fingerprint(source.model, dict(columns), *what)


@contextmanager
def as_traced(source: GraphSource, training: bool) -> Iterator[None]:
    """Context with a model in train or eval mode, and with full meta parameters."""
    whole = _whole_parameters(source)
    drops: AbstractContextManager[None] = nullcontext()
    if source.dropped is not None and training:
        drops = keeping_at_random(source.model, source.dropped)
    with (
        warned_once(source.warned),
        methods_allowed(source.model),
        whole,
        _mode(source.model, training),
        drops,
    ):
        yield


@contextmanager
def _whole_parameters(source: GraphSource) -> Iterator[None]:
    """Context with full meta parameters in place of a rank's shards."""
    own = [(module, dict(module._parameters)) for module in source.model.modules()]
    whole: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for path, module in source.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                meta = source.parameters[f"{path}.{name}".lstrip(".")]
                if parameter not in whole:
                    empty = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
                    whole[parameter] = nn.Parameter(empty, requires_grad=meta.requires_grad)
                    held = {k: v for k, v in vars(parameter).items() if k != ORIGIN_ATTRIBUTE}
                    vars(whole[parameter]).update(held)
                module._parameters[name] = whole[parameter]
        yield
    finally:
        for module, parameters in own:
            module._parameters.update(parameters)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context with a model in train or eval mode; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

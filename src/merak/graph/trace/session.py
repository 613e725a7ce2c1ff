"""A trace's session: replacements and modes that are active while a model runs.

Both are tuples that are walked from the first to the last. A function mode sees a call before those
that were entered ahead of it, and passes it on to them, so the order of the modes is semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.autograd.calls import AutogradCalls
from merak.graph.trace.autograd.func_transforms import func_by_autograd
from merak.graph.trace.branches.conditions import RandomConditions, host_random_in_torch
from merak.graph.trace.branches.host_random import HostRandomFunctions
from merak.graph.trace.calls.eager_loss import LossTail
from merak.graph.trace.calls.model_loss import ModelLoss
from merak.graph.trace.calls.outer_reads import evaluated_alone
from merak.graph.trace.calls.replaced_functions import replaced_once
from merak.graph.trace.modes.autograd_functions import record_autograd_functions
from merak.graph.trace.modes.constant_values import BatchValues, ConstantValues
from merak.graph.trace.modes.ctc_loss import CtcLosses
from merak.graph.trace.modes.fakes import (
    eager_masks,
    fake_weights,
    modules_stay_in_place,
    refuse_host_random,
)
from merak.graph.trace.modes.grad_hooks import TensorHooks
from merak.graph.trace.modes.grouped_products import GroupedProducts
from merak.graph.trace.modes.known_ones import KnownOnes
from merak.graph.trace.modes.metadata_queries import MetadataQueries
from merak.graph.trace.modes.packed_sequences import PackedSequences
from merak.graph.trace.modes.replica_collectives import replica_collectives
from merak.graph.trace.modes.tensor_data import DetachedData
from merak.graph.trace.modes.value_checks import ValueChecks
from merak.graph.trace.modes.vmap import vmap_by_operators
from merak.graph.trace.opaque.collectives import refused_collectives, refused_modules
from merak.graph.trace.opaque.dynamic_region import AssumeNonEmpty, DynamicSizes
from merak.graph.trace.opaque.loops import Loops
from merak.graph.trace.opaque.operator import MODEL_LOSS, OpaqueCall
from merak.graph.trace.opaque.record import RealTensors, record_opaque_modules
from merak.graph.trace.opaque.selection import OpaqueSelection
from merak.graph.trace.repeats.calls import RepeatedCalls
from merak.graph.trace.state.rank_reads import RankReads
from merak.graph.trace.state.record import StateReads
from merak.graph.trace.state.snapshot import restored_state


@dataclass(frozen=True, slots=True)
class Session:
    """State of a trace that is under way: the model, and what the modes find out about it.

    Args:
        model: the model.
        columns: the batch's tensors, by column.
        device: the device that fake tensors claim to be on.
        opaque: modules and functions that are opaque.
        conditions: answers the model's random conditions.
        host_random: records functions that draw on the host.
        real: the model's own parameters and buffers, before fake ones take their place.
        reads: records the Python state that the model reads.
        fake: the mode that makes fake tensors.
        checks: notes checks of values that are assumed to pass.
        packed: follows packed sequences.
        autograd: records gradients that the model takes itself.
        loops: counts operators in loops.
        ranks: records reads of the rank.
        copies_blocks: whether calls of equal blocks are copied.
        calls: opaque calls, in the order in which they were recorded.
        example: what follows from an example batch.
        ones: what follows from columns of ones.
        losses: what of a loss is opaque, by its path.
    """

    model: nn.Module
    columns: Mapping[str, TensorMeta]
    device: torch.device
    opaque: OpaqueSelection
    conditions: RandomConditions
    host_random: HostRandomFunctions
    real: RealTensors
    reads: StateReads
    loops: Loops
    ranks: RankReads
    copies_blocks: bool = False
    fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    checks: ValueChecks = field(default_factory=ValueChecks)
    packed: PackedSequences = field(default_factory=PackedSequences)
    autograd: AutogradCalls = field(default_factory=AutogradCalls)
    calls: list[OpaqueCall] = field(default_factory=list)
    example: BatchValues = field(default_factory=lambda: BatchValues({}))
    ones: KnownOnes = field(default_factory=lambda: KnownOnes({}))
    losses: Mapping[str, LossTail | ModelLoss] = field(default_factory=dict)

    @property
    def has_opaque(self) -> bool:
        """Whether anything is opaque."""
        return bool(self.opaque.modules or self.opaque.functions or self.losses)

    def begin(self, batch: dict[str, torch.Tensor]) -> None:
        """Record the fake tensors of a batch that a call begins with."""
        self.example.begin(batch)
        self.ones.begin(batch)


def _noted(session: Session) -> tuple[Any, ...]:
    """What modes have noted of the model so far: a call during which it changes is not copied."""
    conditions = session.conditions
    decided = (len(conditions.made), conditions.asks_batch, len(conditions.seeded))
    return (*decided, session.packed.is_used, len(session.calls))


Enter = Callable[[Session], AbstractContextManager[Any]]
"""Makes a context that a trace runs in."""


def _losses_of_objects(session: Session) -> AbstractContextManager[Any]:
    loss = session.losses.get(MODEL_LOSS)
    return loss.in_place() if isinstance(loss, ModelLoss) else nullcontext()


def _assume_non_empty(session: Session) -> AbstractContextManager[Any]:
    return AssumeNonEmpty() if session.opaque.sizes is DynamicSizes.NON_EMPTY else nullcontext()


def _copied_blocks(session: Session) -> AbstractContextManager[Any]:
    if not session.copies_blocks:
        return nullcontext()
    calls = RepeatedCalls(session.model, session.reads, session.loops, lambda: _noted(session))
    return calls.recorded()


REPLACEMENTS: tuple[tuple[Enter, str], ...] = (
    (
        lambda s: restored_state(s.model, s.reads.loss_fn),
        "what forward leaves in Python state is undone at the end",
    ),
    (lambda s: fake_weights(s.model, s.fake, s.device), "parameters and buffers take no memory"),
    (
        lambda s: eager_masks(s.columns, s.ones),
        "transformers chooses attention masks as in eager code",
    ),
    (lambda s: record_autograd_functions(s.model), "their own backward is not lost"),
    (lambda s: modules_stay_in_place(), "the model finds its modules on their device already"),
    (
        lambda s: replaced_once(),
        "a script's function in the place of torch's is called once a call",
    ),
    (lambda s: func_by_autograd(), "torch.func becomes calls of autograd, which are recorded"),
    (lambda s: vmap_by_operators(), "what runs per sample becomes operators on whole tensors"),
    (
        lambda s: host_random_in_torch(s.model, s.conditions),
        "numbers drawn on the host are tensors",
    ),
    (
        lambda s: s.host_random.recorded(s.model),
        "functions that draw arrays are operators; after the line above, whose draws they are not",
    ),
    (lambda s: s.ranks.recorded(), "reads of the rank and the number of ranks find replicas"),
    (
        lambda s: evaluated_alone(s.model, s.reads.loss_fn, s.ranks),
        "a batch of an evaluation is one replica's, whatever a loss was given for training",
    ),
    (lambda s: refused_modules(s.model), "they communicate before any operator shows it"),
    (lambda s: refused_collectives(), "no function mode: sees operators of any caller"),
    (lambda s: replica_collectives(s.ranks), "those that mean one process's batch are operators"),
)
"""Functions, weights and attributes with stand-ins while a model is traced, and why.

They stay while the model runs once more in eager code, to explain a failure.
"""


MODES: tuple[tuple[Enter, str], ...] = (
    (lambda s: s.reads.recorded(), "no function mode: sees attributes that Python code reads"),
    (
        lambda s: refuse_host_random(s.model),
        "no function mode: compares the host generators' states before and after the run",
    ),
    (_copied_blocks, "no function mode: calls of modules; inside of what records their reads"),
    (lambda s: s.conditions, "last to see a call: what others have answered is not random"),
    (lambda s: s.checks, "no function mode: answers where no mode knows a tensor's boolean"),
    (lambda s: CtcLosses(), "sees labels selected by a mask that no constant has replaced"),
    (lambda s: GroupedProducts(), "any place: no other mode looks at grouped products"),
    (lambda s: s.packed, "sees operators on packed rows as the model wrote them, but for .data"),
    (lambda s: s.host_random, "takes arrays that its operators stand for in place of torch.tensor"),
    (lambda s: DetachedData(), "the modes above see detach() in place of .data"),
    (lambda s: s.autograd, "the modes above see one operator in place of a call of autograd"),
    (_assume_non_empty, "looks at the sizes of what the modes above return"),
    (lambda s: TensorHooks(), "refuses a hook; no mode above needs to see it"),
    (lambda s: ConstantValues(), "the modes above see indices in place of masks of known values"),
    (lambda s: s.ones, "answers before conditions on the batch are noted, or refused, above"),
    (
        lambda s: s.loops,
        "counts calls of the model alone, so outside of all modes that make further ones",
    ),
    (
        lambda s: s.example if s.has_opaque else nullcontext(),
        "computes what follows from the example batch, which the line below probes modules on",
    ),
    (
        lambda s: record_opaque_modules(
            s.model, s.opaque, s.real, s.device, s.calls, s.example.values, s.losses
        ),
        "notes of which tensor a number is, once the modes above have returned it",
    ),
    (_losses_of_objects, "no function mode: calls what the line above records"),
    (
        lambda s: MetadataQueries(s.packed),
        "first to see a call: queries of metadata, which are most, skip all modes above",
    ),
)
"""Contexts that record or refuse what a model does while it is traced, and why each stands there.

A call passes them from the last to the first; "above" are those that stand before one here.
"""


@contextmanager
def entered(contexts: Sequence[tuple[Enter, str]], session: Session) -> Iterator[None]:
    """Enter contexts from the first to the last.

    Args:
        contexts: with their reasons.
        session: the trace that they are for.
    """
    with ExitStack() as stack:
        for enter, _ in contexts:
            stack.enter_context(enter(session))
        yield

"""Losses that values decide: their calls of the model are traced, and the rest runs as Python.

`if len(chosen) > 0:` behind `chosen = rewards[labels]` has no answer in a trace. Marked by
`eager_loss`, such a loss is traced up to its last call of the model. What follows, its tail, is one
opaque operator of the last stage: it runs the whole function again on the real values of a
microbatch, and each call of the model in it returns what the stages have computed.

What the tail does besides, such as append to lists, is undone: that belongs to all ranks, in the
order of one process. So it writes a journal of what it has read of tensors, and of the sizes that
values have decided, which is one more output. Behind the step each rank runs the loss again for
each microbatch, on fake tensors, with the answers of its journal (`EagerReplay`).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from merak.core.errors import TraceError, TrainingError
from merak.core.source_lines import model_line, with_text
from merak.core.tensor_meta import TensorMeta
from merak.data.objects import OBJECTS, layouts_of, of_layouts, unpack_objects
from merak.graph.trace.calls.call import Call, LossFunction, call_model, does_call_model
from merak.graph.trace.calls.host_reads import READ, HostReads, Run, model_calls
from merak.graph.trace.calls.loss_recorder import made_up, unheard
from merak.graph.trace.calls.outer_reads import evaluated_alone
from merak.graph.trace.calls.outputs import named_outputs, nested
from merak.graph.trace.calls.replay import (
    FakeMicrobatch,
    Layout,
    ModelCall,
    replayed,
    run_on_fakes,
)
from merak.graph.trace.calls.unread import as_rows
from merak.graph.trace.modes.metadata_queries import QUERIES
from merak.graph.trace.modes.replica_collectives import replica_collectives
from merak.graph.trace.opaque.collectives import refused_modules
from merak.graph.trace.opaque.dynamic_region import AssumeNonEmpty
from merak.graph.trace.state.rank_reads import RankReads
from merak.graph.trace.state.snapshot import Snapshot, restored_state

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_EAGER = "_merak_eager"


class EagerLossError(TraceError, TrainingError):
    """A loss does what no stage could honour: seen in its trace, or for the values of a batch."""


JOURNAL = READ + "journal"
"""Name of the output with what the tail of a loss has read."""

_JOURNAL_BYTES = 16_384
_LENGTH_BYTES = 8


def eager_loss(loss_fn: F) -> F:
    """Mark a loss function whose values decide what it computes: it runs as Python.

    Use it as a decorator: of `compute_loss` of a trainer, of a `compute_loss_func`, of the
    `loss_fn` of `merak.parallelize`, or of a loss of sentence-transformers. Its calls of the model
    are traced, cut and sharded as ever. What follows the last of them runs on the last stage as
    written: with branches on values, Python loops over them, and sizes that depend on them. It is
    not sharded by tensor parallelism, so let it get what is small, such as log-probabilities of
    tokens in place of logits.

    Args:
        loss_fn: the function; it is marked itself.

    Returns:
        The same function.
    """
    setattr(getattr(loss_fn, "__func__", loss_fn), _EAGER, True)
    return loss_fn


def is_eager(loss_fn: Any) -> bool:
    """Whether a loss function is marked by `eager_loss`."""
    return getattr(loss_fn, _EAGER, False) is True


def as_eager_as(called: Iterable[Any], loss_fn: LossFunction) -> LossFunction:
    """A loss function, marked by `eager_loss` where one of those that it calls is.

    Args:
        called: the functions that it calls.
        loss_fn: the loss function.
    """
    return eager_loss(loss_fn) if any(map(is_eager, called)) else loss_fn


# ---- journals ----


@dataclass(slots=True)
class Journal:
    """What a run of a loss has read, in order; or, of another run, the answers to its reads.

    Args:
        entries: pickled, with a description of what each is of.
        is_written: whether a run writes it; else it reads it.
    """

    entries: list[bytes] = field(default_factory=list)
    is_written: bool = True

    def entry(self, what: str, make: Callable[[], Any]) -> Any:
        """The next entry: made and written, or read.

        Args:
            what: description of what it is of.
            make: makes it.

        Raises:
            EagerLossError: another entry is next, as values decide otherwise.
        """
        if self.is_written:
            value = make()
            self.entries.append(pickle.dumps((what, value)))
            return value
        while self.entries:  # of which some may be of rank 0 alone
            written, value = pickle.loads(self.entries.pop(0))
            if written == what:
                return value
        raise _changed("reads something else behind the step")

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """The journal as bytes.

        Raises:
            EagerLossError: there are too many.
        """
        text = pickle.dumps(self.entries)
        if len(text) + _LENGTH_BYTES > _JOURNAL_BYTES:
            raise EagerLossError(
                f"the loss reads {len(text)} bytes of values of a microbatch on the host, more "
                f"than the {_JOURNAL_BYTES} that are sent to all ranks behind the step; read sums "
                "or means in place of whole tensors."
            )
        whole = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        found = torch.frombuffer(bytearray(whole.ljust(_JOURNAL_BYTES, b"\0")), dtype=torch.uint8)
        return found.to(device)

    @staticmethod
    def of(tensor: torch.Tensor) -> Journal:
        """The journal that `to_tensor` has made bytes of, to be read."""
        whole = tensor.numpy().tobytes()
        length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
        return Journal(pickle.loads(whole[_LENGTH_BYTES : _LENGTH_BYTES + length]), False)


class _Reads(HostReads):
    """Function mode whose reads of tensors are entries of a journal.

    Args:
        call: as of `HostReads`.
        journal: that is written or read.
        model: as of `HostReads`.
    """

    def __init__(
        self, call: Callable[[nn.Module, Run], Any], journal: Journal, model: nn.Module
    ) -> None:
        super().__init__(call, lambda tensor, key: tensor, is_exact=True, model=model)
        self._journal = journal

    def _has_no_values(self, tensor: Any) -> bool:
        return self.is_described(tensor)

    def _read(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        if func is torch.Tensor.tolist and tensor.ndim:  # which fakes read one by one
            with self:
                return [one.tolist() for one in tensor]
        func = torch.Tensor.item if func is torch.Tensor.tolist else func

        def make() -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return func(tensor, *args, **kwargs)

        return self._journal.entry(f"{func.__name__} {self.key(tensor)}", make)


_SWITCH: Any = torch.Tensor.requires_grad
_OF_NO_VALUES = QUERIES | {torch.Tensor.requires_grad_, _SWITCH.__set__}
"""What code may do with any parameter, as PEFT does when it changes adapters."""


class NoWeights(TorchFunctionMode):
    """Function mode that refuses to compute with parameters, whose gradients would be lost.

    Args:
        model: that has them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse parameters among the arguments of whatever computes."""
        for leaf in () if func in _OF_NO_VALUES else tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                names = (name for name, own in self._model.named_parameters() if own is leaf)
                raise EagerLossError(
                    f"the loss computes with {next(names, 'a parameter')} itself at "
                    f"{with_text(model_line())}, and runs as Python on the last stage, which may "
                    "not have it: compute with it in the model's forward."
                )
        return func(*args, **(kwargs or {}))


class _Sizes(TorchDispatchMode):
    """Dispatch mode in which sizes and numbers that values decide are entries of a journal."""

    def __init__(self, journal: Journal, reads: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._journal, self._reads = journal, reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the layout of what values decide, or make fakes of that layout."""
        kwargs = kwargs or {}
        made: list[Any] = []

        def make() -> Any:
            made.append(func(*args, **kwargs))
            return tree_map(Layout.of, made[0])

        with torch._C.DisableTorchFunction():  # whose modes would see how fakes are made
            if not _is_of_values(func, args):
                return func(*args, **kwargs)
            layouts = self._journal.entry(f"{func} {self._reads.given}", make)
            return made[0] if made else tree_map(_made, layouts)


def _made(leaf: Any) -> Any:
    return leaf.made() if isinstance(leaf, Layout) else leaf


_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _is_of_values(func: Any, args: Any) -> bool:
    """Whether values decide the size of what an operator returns, or the number that it is."""
    if not any(tag in func.tags for tag in _VALUES):
        return False
    is_index = func is torch.ops.aten.index.Tensor
    return not is_index or any(i is not None and i.dtype in _MASKS for i in args[1])


_MASKS = (torch.bool, torch.uint8)


# ---- the tail ----


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    model: nn.Module
    call: Call
    unwatched: Callable[[], AbstractContextManager[None]]


_PARTS: WeakKeyDictionary[LossTail, _Parts] = WeakKeyDictionary()
"""Models and calls of tails: apart from these, whose attributes are looked at as Python state."""


class LossTail(nn.Module):
    """The rest of a loss behind its calls of the model, an opaque module of the graph.

    Args:
        model: the model that the loss calls.
        call: with the loss function.
        unwatched: makes a context in which a trace does not record what code reads.
    """

    def __init__(
        self, model: nn.Module, call: Call, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self.train(model.training)
        _PARTS[self] = _Parts(model, call, unwatched)

    def forward(self, batch: dict[str, torch.Tensor], results: Sequence[Any]) -> Any:
        """Run the loss.

        Args:
            batch: columns of a microbatch.
            results: of each call of the model.

        Returns:
            The loss, as (loss, outputs by name, journal) where the function calls the model.

        Raises:
            EagerLossError: the loss calls the model again, or leaves tensors in Python state.
        """
        parts = _PARTS[self]
        with parts.unwatched():
            return self._run(parts.model, parts.call, batch, results)

    def _run(
        self,
        model: nn.Module,
        call: Call,
        batch: dict[str, torch.Tensor],
        results: Sequence[Any],
    ) -> Any:
        loss_fn: Any = call.loss_fn
        ranks = RankReads(training=self.training)
        if not does_call_model(loss_fn):
            kept = _kept_state(loss_fn, is_undone=False)
            with kept, NoWeights(model), among_replicas(model, loss_fn, ranks):
                return loss_fn(results[0], unpack_objects(batch))
        journal = Journal()
        reads = _Reads(partial(_next, iter(results)), journal, model)
        given = unpack_objects(batch)
        for name in sorted(n for n, column in given.items() if isinstance(column, list)):
            journal.entry(f"objects of {name}", partial(layouts_of, given[name]))
        reads.name_columns(given)
        with ExitStack() as stack:
            stack.enter_context(_kept_state(loss_fn, is_undone=True))
            rank = stack.enter_context(unheard())
            stack.enter_context(NoWeights(model))
            stack.enter_context(among_replicas(model, loss_fn, ranks))
            stack.enter_context(_Sizes(journal, reads))
            stack.enter_context(reads.followed())
            loss, result = loss_fn(model, {**given, **call.fixed})
        if ranks.are_met and rank.is_read and ranks.world and ranks.world.size > 1:
            raise EagerLossError(
                "the loss, which is marked by merak.eager_loss, takes something from other "
                "replicas and asks for the rank of the process, which is 0 wherever such a loss "
                "runs; write it as a compute_loss_func(outputs, labels, num_items_in_batch), in "
                "which dist.get_rank() is the replica's, or leave out what asks."
            )
        journal.entry("the loss", lambda: reads.key(loss))
        return loss, dict(named_outputs(result)), journal.to_tensor(loss.device)


@contextmanager
def among_replicas(model: nn.Module, loss_fn: Any, ranks: RankReads) -> Iterator[None]:
    """Context in which the default group is that of the replicas, as in a trace.

    Args:
        model: that the loss is of.
        loss_fn: the loss function.
        ranks: what it finds of them.
    """
    with (
        ranks.recorded(),
        evaluated_alone(model, loss_fn, ranks),
        refused_modules(model),
        replica_collectives(ranks),
    ):
        yield


class _LastCall(BaseException):
    """Ends a loss behind its last call of the model, whatever it catches."""


def count_calls(model: nn.Module, batch: dict[str, torch.Tensor], call: Call) -> int:
    """The number of calls of the model in a loss, with made-up answers to what it reads.

    Args:
        model: the model.
        batch: fake tensors.
        call: how the loss is called.

    Returns:
        The number, with one that fails; 0 where it gives no loss.
    """
    number = 0

    def note(module: nn.Module, run: Run) -> Any:
        nonlocal number
        number += 1
        return run()

    def record(run: Run, own: dict[str, torch.Tensor]) -> Any:
        reads = HostReads(note, lambda tensor, key: made_up(tensor), False, (), model)
        with unheard(), AssumeNonEmpty(), reads.followed():
            return run()

    if not does_call_model(call.loss_fn):
        return 1
    with restored_state(model, call.loss_fn):
        try:
            found = call_model(model, batch, call, record)
        except Exception as error:
            logger.debug("the loss was followed up to its call %d: %s", number, error)
            return number
    return number if "loss" in found else 0


def call_to_tail(
    model: nn.Module, batch: dict[str, torch.Tensor], call: Call, tail: LossTail, num_calls: int
) -> tuple[dict[str, torch.Tensor], tuple[ModelCall, ...]]:
    """Call a model as its loss does, and the tail of the loss.

    Args:
        model: the model.
        batch: its columns.
        call: how the loss is called.
        tail: its tail.
        num_calls: of the model, behind which the tail begins.

    Returns:
        Outputs by name, and what the model returned.
    """
    results: list[Any] = []

    def note(module: nn.Module, run: Run) -> Any:
        results.append(run())
        if len(results) == num_calls:
            raise _LastCall
        return results[-1]

    def record(run: Run, own: dict[str, torch.Tensor]) -> Any:
        with model_calls(note, model), suppress(_LastCall):
            run()
        loss, outputs, journal = tail.forward(own, results)
        return loss, {**nested(outputs), JOURNAL: journal}

    def loss_of(result: Any, own: dict[str, Any]) -> Any:
        return tail.forward(as_rows(own), [result])

    if not does_call_model(call.loss_fn):
        call = replace(call, loss_fn=loss_of)
    return call_model(model, batch, call, record), tuple(map(ModelCall.of, results))


def _next(returned: Iterator[Any], module: nn.Module, _: Run) -> Any:
    """What the next call of the model returns."""
    for result in returned:
        return result
    raise _changed("calls the model once more")


@contextmanager
def _kept_state(loss_fn: Any, is_undone: bool) -> Iterator[None]:
    """Context behind which a loss has left nothing in Python state.

    Args:
        loss_fn: the loss function.
        is_undone: whether what it has left is undone; else it may not leave anything.

    Raises:
        EagerLossError: it has left what cannot be undone, or repeated.
    """
    before = Snapshot.of_loss(loss_fn)
    yield
    left = before.changes()
    lost = [
        one
        for one in left
        if not is_undone or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(one.new))
    ]
    lost_in = [str(one) for one in lost] + [held.place.label for held in before.written()]
    for where in lost_in:
        raise EagerLossError(
            f"the loss keeps something in {where}, and is marked by merak.eager_loss, so that only "
            "one stage runs it with values; "
            + (
                "keep numbers in place of tensors, such as value.item()."
                if is_undone
                else "let it return its loss alone."
            )
        )
    for place in before.places if left else ():
        place.restore()


def _changed(what: str) -> EagerLossError:
    return EagerLossError(
        f"the loss, which is marked by merak.eager_loss, {what} at {with_text(model_line())}. Such "
        "a loss may depend on its batch and on what the model returns for it: not on parameters, "
        "nor on what microbatches before have left. It calls the model as often for each batch."
    )


@dataclass(frozen=True, slots=True, eq=False)
class EagerReplay:
    """A loss that has a tail, to be run again behind a step for what it does besides.

    Args:
        run: the loss function, `run(model, batch)`.
        fixed: arguments in every batch that are no tensors.
        calls: of the model, and what each returned.
    """

    run: Callable[[nn.Module, dict[str, Any]], Any]
    fixed: Mapping[str, Any]
    calls: tuple[ModelCall, ...]

    def __call__(
        self,
        model: nn.Module,
        columns: Mapping[str, TensorMeta],
        values: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Run the loss with the answers of its journal; arguments as of `Replay`.

        Raises:
            EagerLossError: it computes another loss than its tail, whose Python state was older.
        """
        fakes = FakeMicrobatch.of(columns, self.calls, device)  # whose sizes values decide
        returned = map(ModelCall.made, self.calls, fakes.results)
        journal = Journal.of(values[JOURNAL])
        reads = _Reads(partial(_next, returned), journal, model)
        sizes = _Sizes(journal, reads)
        for name in sorted(n for n, meta in columns.items() if meta.dtype is OBJECTS):
            layouts = journal.entry(f"objects of {name}", bytes)
            with fakes.mode:
                fakes.batch[name] = of_layouts(layouts, device)
        with replayed():
            loss = run_on_fakes(self.run, model, self.fixed, fakes, reads, sizes)
        if journal.entry("the loss", lambda: "") != reads.key(loss):
            raise _changed("computes something else behind the step")

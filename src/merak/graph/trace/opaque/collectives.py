"""Collectives in a model's own code, which are refused where they are no operators of its graph.

A model's forward and its loss run in pieces: pipeline ranks run other lines of it, tensor parallel
ranks have the same samples, and replicas may have other numbers of microbatches. So ranks that meet
inside one line would wait for ever, or count samples twice. Those that mean one process with a
larger batch become operators over the replicas (`modes/replica_collectives.py`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from inspect import ismodule
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from merak.core.errors import TraceError
from merak.core.source_lines import MERAK, is_library, model_line, with_text
from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.weights.rank_agreement import is_distributed

logger = logging.getLogger(__name__)

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
"""Of operators that communicate: those behind `torch.distributed`, its functional collectives and
DTensor."""

INSTEAD = (
    "no layout would give what one process computes: pipeline ranks run other lines and would wait "
    "for ever, tensor parallel ranks have the same samples and would count them twice, and "
    "replicas would mix microbatches. Leave it out: Merak itself reduces gradients, losses and "
    "sums over split weights, and gives all replicas the same weights. What only prints may stay, "
    "under `if dist.get_rank() == 0`. Of the default group, all_reduce, all_gather, "
    "all_gather_into_tensor and broadcast may stay, and those of torch.distributed.nn.functional, "
    "outside of opaque modules and of backwards of one's own: they meet the replicas."
)


class CollectiveError(TraceError):
    """A model's own code communicates with other ranks; no module around it may be opaque."""


class RefusedCollectives(TorchDispatchMode):
    """Dispatch mode that refuses operators which communicate with other ranks.

    A refusal that the model's code catches is raised again at the end.

    Args:
        of_model: whether what the replicas' operators send is let pass: it is none of the model's.
    """

    supports_higher_order_operators = True

    def __init__(self, of_model: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_model = of_model
        self._refused: CollectiveError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operator on that is no collective.

        Raises:
            CollectiveError: it is one, of a group with several ranks.
        """
        if func.namespace in _NAMESPACES and _num_ranks((args, kwargs)) > 1:
            is_models = not _is_of_operator(sys._getframe(1))
            if self._of_model and not is_models:
                return func(*args, **(kwargs or {}))
            name = str(func.name()).rpartition("::")[2].partition(".")[0].strip("_")
            self._refused = CollectiveError(
                f"{with_text(model_line())} communicates with other ranks ({name}) while the model "
                f"runs, so that {INSTEAD}"
                if is_models
                else f"{with_text(model_line())} takes something from other replicas for these "
                "values of the batch, and did not when the loss was tried as the model was traced; "
                "replicas with other values would not: let it do so whatever the values are."
            )
            raise self._refused
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Leave the mode.

        Raises:
            CollectiveError: the model's code has caught a refusal.
        """
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if self._refused is not None and value is None:
            raise self._refused


def _is_of_operator(frame: FrameType | None) -> bool:
    """Whether one of Merak's own operators communicates, and no line of a model.

    Args:
        frame: where to begin.
    """
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OPERATORS)


_OPERATORS = os.path.join(MERAK, "ops") + os.sep


def _num_ranks(arguments: Any) -> int:
    """Size of the process group among a collective's arguments; of all ranks where none is."""
    c10d: Any = dist.distributed_c10d
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).size()
        if isinstance(leaf, str):
            try:
                return int(c10d._resolve_process_group(leaf).size())
            except (RuntimeError, ValueError, KeyError):  # it is the name of something else
                continue
    return dist.get_world_size()


def refused_collectives(of_model: bool = False) -> AbstractContextManager[Any]:
    """Context in which this thread's collectives are refused; nothing where no other rank is.

    Args:
        of_model: as of `RefusedCollectives`.
    """
    return RefusedCollectives(of_model) if is_distributed() else nullcontext()


@contextmanager
def refused_modules(model: nn.Module) -> Iterator[None]:
    """Refuse torch modules and functions that communicate between ranks, such as SyncBatchNorm.

    Args:
        model: the model, whose paths the error names.

    Raises:
        CollectiveError: one is called.
    """

    def refusing(original: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
        @wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            group = vars(self).get("process_group")
            if not self.training or dist.get_world_size(group) == 1:
                return original(self, *args, **kwargs)
            path = next((p for p, module in model.named_modules() if module is self), "")
            raise CollectiveError(
                f"{path or 'the model'} is a {type(self).__name__}, which {what} "
                f"({with_text(model_line())}); {instead}."
            )

        return forward

    def new_group(*args: Any, **kwargs: Any) -> Any:
        where = with_text(model_line())
        raise CollectiveError(
            f"{where} makes a process group while the model runs, for which all ranks would have "
            "to meet in this line; leave it out, or make it before training."
        )

    if not is_distributed():
        yield
        return
    with ExitStack() as stack:
        for cls, what, instead in _MODULES:
            forward = refusing(cls.forward, what, instead)
            stack.enter_context(mock.patch.object(cls, "forward", forward))
        c10d = dist.distributed_c10d
        stack.enter_context(mock.patch.object(c10d, "_new_process_group_helper", new_group))
        yield


_MODULES: tuple[tuple[type[nn.Module], str, str], ...] = (
    (
        nn.SyncBatchNorm,
        "takes its statistics from the samples of all ranks",
        "use BatchNorm, which normalizes each microbatch as one process does: leave out "
        "convert_sync_batchnorm",
    ),
    (
        nn.parallel.DistributedDataParallel,
        "reduces gradients between all ranks",
        "give Merak the module inside it, whose gradients it reduces itself",
    ),
)
"""Modules that communicate when they train: what for, and what to do instead."""


def may_communicate(module: nn.Module) -> bool:
    """Whether the files of a module's classes, or of its parts', name `torch.distributed`."""
    return any(names_distributed(cls) for part in module.modules() for cls in type(part).__mro__)


@cache
def names_distributed(cls: type) -> bool:
    """Whether the file of a class, or the class, names `torch.distributed`."""
    source = sys.modules.get(cls.__module__)
    if source is None or cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    functions = [*vars(source).values(), *vars(cls).values()]
    return any(
        str(getattr(value, "__name__" if ismodule(value) else "__module__", "")).startswith(
            "torch.distributed"
        )
        or "distributed" in getattr(getattr(value, "__code__", None), "co_names", ())
        for value in functions
    )


def refuse_in_function(function: type[Function], apply: Callable[..., Any], args: Any) -> None:
    """Refuse an autograd function whose backward communicates, by running it on fake tensors.

    Args:
        function: the autograd function.
        apply: applies it, as `Function.apply` does.
        args: its arguments.

    Raises:
        CollectiveError: its backward communicates.
    """
    if is_distributed():
        in_own_thread(_run_function, function, apply, args)


def _run_function(function: type[Function], apply: Callable[..., Any], args: Any) -> None:
    with refused_collectives(), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            results = tree_leaves(apply(function, *tree_map(_leaf, args)))
        except CollectiveError:
            raise
        except Exception:  # whatever it does on fake tensors; the trace calls it with its own
            return
        refuse_in_backward([r for r in results if isinstance(r, torch.Tensor)])


def refuse_in_backward(outputs: Sequence[torch.Tensor]) -> None:
    """Run a backward, of hooks and code of the model's own, and refuse its collectives.

    Args:
        outputs: results with their graph, made under `refused_collectives`.

    Raises:
        CollectiveError: the backward communicates.
    """
    live = [output for output in outputs if output.requires_grad]
    if not (live and is_distributed()):
        return
    try:
        torch.autograd.backward(live, [torch.ones_like(output) for output in live])
    except CollectiveError:
        raise
    except Exception as error:  # on values of no batch; training shows what it does on real ones
        logger.debug("a backward on synthetic values fails: %s", error)


def _leaf(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)

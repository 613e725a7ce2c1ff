"""A process group on the CPU that keeps NCCL's rules, for tests with real ranks.

What gloo forgives and NCCL does not:

- operations of a group run one after another, in the order in which a rank calls them, and a send
  is not complete before its receive has begun;
- the first operation of a group, and the first transfer between two of its ranks in a direction,
  blocks the hosts of all ranks that take part, unless it is one of a batch;
- some element types, tensors that are not contiguous, and results that lie over one another, are
  refused;
- a result is there only once it was waited for: until then its memory holds NaN (or a large whole
  number), and what is sent must not change.

Each of them is an error here, as are ranks whose calls differ, and works that are gone before
anybody has waited for them. What torch's own C++ code sends goes by another way, without rules.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from merak.engine.comm.p2p import CARRIED

NAME = "nccl_rules"
"""The backend's name for `init_process_group`."""

FIRST_USE = timedelta(seconds=60)
"""How long a rank waits for another one in their first operation before it is an error."""

_ProcessGroup: Any = dist.ProcessGroup  # whose signatures differ from version to version
_Tensors = Sequence[torch.Tensor]


class RuleError(Exception):
    """Something that would hang, fail or give wrong numbers with NCCL."""


@dataclass
class _Operation:
    """What a group's stream runs.

    Args:
        start: begins it, on copies of what it reads, and gives what to wait for.
        results: copies of the results, in the order of `writes`.
        writes: the caller's tensors for them.
        reads: the caller's tensors that must not change until the end, with what they held.
        done: set at the end.
        error: of gloo.
        end: what follows is called behind it.
    """

    name: str
    start: Callable[[], list[dist.Work]]
    results: list[torch.Tensor]
    writes: list[torch.Tensor]
    reads: list[tuple[torch.Tensor, torch.Tensor]]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    end: torch.futures.Future[None] = field(default_factory=torch.futures.Future)

    def run(self) -> None:
        """Run to the end; on the group's thread."""
        try:
            for work in self.start():
                work.wait()
        except Exception as error:
            self.error = error
        self.done.set()
        self.end.set_result(None)

    def let_go(self) -> None:
        """Forget the tensors, though the group's thread knows the operation until its next one."""
        self.start, self.results, self.writes, self.reads = list, [], [], []


class _Work(dist.Work):
    """The handle of an operation, whose results are there once it was waited for."""

    def __init__(self, operation: _Operation, dropped: list[str]) -> None:
        super().__init__()
        self._operation = operation
        self._dropped = dropped
        self._is_settled = False

    def __del__(self) -> None:
        if not self._is_settled:
            self._dropped.append(self._operation.name)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, and let the caller see the results."""
        operation = self._operation
        if not operation.done.wait(timeout.total_seconds() if timeout else None):
            raise RuleError(f"{operation.name} was not complete in {timeout}")
        if operation.error is not None:
            raise operation.error
        if self._is_settled:
            return True
        self._is_settled = True
        with torch.no_grad(), torch._C.DisableTorchFunction():  # which see nothing of NCCL's work
            for tensor, before in operation.reads:
                if not torch.equal(_bytes(tensor), _bytes(before)):
                    raise RuleError(f"a tensor of {operation.name} was changed before it was sent")
            for tensor, result in zip(operation.writes, operation.results, strict=True):
                tensor.detach().copy_(result)
        operation.let_go()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the results, whose callbacks find them written."""

        writes = self._operation.writes

        def settled(_: torch.futures.Future[None]) -> list[torch.Tensor]:
            self.wait()
            return writes

        return self._operation.end.then(settled)

    def is_completed(self) -> bool:
        """Whether it is complete; its results are there after `wait` alone."""
        return self._operation.done.is_set()


class RuledGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks over gloo that keeps NCCL's rules.

    Args:
        options: torch's, of a backend that is made.
    """

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.log: list[str] = []
        self.dropped: list[str] = []
        self.batch: list[tuple[str, _Operation, int]] | None = None
        self._name, self._own, self._store = options.group_id, rank, options.store
        self._carrier = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._register_backend(  # of torch's own C++ code (DTensor, its checkpoints): no rules
            torch.device("cpu"),
            dist.ProcessGroup.BackendType.GLOO,
            dist.ProcessGroupGloo(
                dist.PrefixStore("torch", options.store), rank, size, options.timeout
            ),
        )
        self._met: set[str] = set()
        self._stream: queue.SimpleQueue[list[_Operation] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=f"{NAME} {self._name}").start()

    def getBackendName(self) -> str:
        """Name of the backend; torch asks for it under this name."""
        return NAME

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return str(self._name)

    def _get_sequence_number_for_group(self) -> int:
        """How many operations this rank has begun; the engine counts by it what others wait for."""
        return len(self.log)

    def close(self) -> None:
        """End the group's thread."""
        self._stream.put(None)

    # ---- collectives ----

    def allreduce(self, tensors: _Tensors, options: Any = None) -> dist.Work:
        """Reduce in place."""
        given = options or dist.AllreduceOptions()
        return self._collective(
            f"all_reduce {given.reduceOp.op}",
            tensors,
            tensors,
            lambda own, out: [self._carrier.allreduce(_into(out, own), given)],
        )

    def broadcast(self, tensors: _Tensors, options: Any) -> dist.Work:
        """Send one rank's tensors to all."""
        return self._collective(
            f"broadcast from {options.rootRank}",
            tensors,
            tensors,
            lambda own, out: [self._carrier.broadcast(_into(out, own), options)],
        )

    def allgather(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, options: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks in lists."""
        (places,) = outputs
        return self._collective(
            "all_gather", inputs, places, lambda own, out: [self._carrier.allgather([out], own)]
        )

    def all_gather_single(
        self, output: torch.Tensor, own: torch.Tensor, options: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks in one."""
        return self._collective(
            "all_gather_single",
            [own],
            [output],
            lambda own, out: [self._carrier._allgather_base(out[0], own[0])],
        )

    def all_gather_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, options: Any = None
    ) -> dist.Work:
        """Gather one tensor, as torch's own C++ code asks for it."""
        (output,), (own,) = outputs, inputs
        return self.all_gather_single(output, own, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, everything: torch.Tensor, options: Any
    ) -> dist.Work:
        """Reduce, and leave each rank its part."""
        return self._collective(
            f"reduce_scatter {options.reduceOp.op}",
            [everything],
            [output],
            lambda own, out: [self._carrier._reduce_scatter_base(out[0], own[0], options)],
        )

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, to: list[int], of: list[int], *_: Any
    ) -> dist.Work:
        """Exchange rows: `of` is how many go to each rank, `to` how many come from each."""
        return self._collective(
            "all_to_all",
            [own],
            [output],
            lambda own, out: [self._carrier.alltoall_base(out[0], own[0], to, of)],
            sizes=False,
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks: an all-reduce, as with NCCL."""
        return self.allreduce([torch.zeros(1)])

    # ---- transfers ----

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Send to a rank of the group, once its receive has begun."""
        token = torch.zeros(1)

        def start(own: _Tensors) -> list[dist.Work]:
            self._carrier.recv([token], peer, 1).wait()
            return [self._carrier.send(list(own), peer, 0)]

        operation = self._checked(f"send to {peer}", tensors, [], lambda own, _: start(own))
        return self._transfer(f"{self._own}>{peer}", operation, peer)

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Receive from a rank of the group."""
        token = torch.zeros(1)

        def start(out: list[torch.Tensor]) -> list[dist.Work]:
            ready = self._carrier.send([token], peer, 1)
            return [ready, self._carrier.recv(out, peer, 0)]

        operation = self._checked(f"receive from {peer}", [], tensors, lambda _, out: start(out))
        return self._transfer(f"{peer}>{self._own}", operation, peer)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _transfer(self, edge: str, operation: _Operation, peer: int) -> dist.Work:
        tensors = operation.writes or [tensor for tensor, _ in operation.reads]
        self.log.append(f"{edge} {_described(tensors)}")
        work = _Work(operation, self.dropped)
        if self.batch is not None:
            self.batch.append((edge, operation, peer))
            return work
        self._meet(edge, [peer])
        self._stream.put([operation])
        return work

    def end_batch(self) -> None:
        """Run the transfers of a batch together; their ranks connect at once."""
        assert self.batch is not None
        batch, self.batch = self.batch, None
        for edge, _, _ in batch:
            self._announce(edge)
        for edge, _, peer in batch:
            self._meet(edge, [peer])
        self._stream.put([operation for _, operation, _ in batch])

    def _collective(
        self,
        name: str,
        reads: _Tensors,
        writes: _Tensors,
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], list[dist.Work]],
        sizes: bool = True,
    ) -> dist.Work:
        operation = self._checked(name, reads, writes, start)
        self.log.append(f"{name} {_described(reads) if sizes else ''}")
        self._meet("all", [r for r in range(self.size()) if r != self._own])
        work = _Work(operation, self.dropped)
        self._stream.put([operation])
        return work

    def _checked(
        self,
        name: str,
        reads: _Tensors,
        writes: _Tensors,
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], list[dist.Work]],
    ) -> _Operation:
        """An operation on copies of its tensors; what it writes is spoilt from here on."""
        if any(isinstance(tensor, FakeTensor) for tensor in (*reads, *writes)):
            raise RuleError(f"{name} of fake tensors, which a drain catches below Python alone")
        for tensor in (*reads, *writes):
            if tensor.dtype not in CARRIED or not tensor.is_contiguous():
                raise RuleError(f"{name} of {tensor.dtype} {tuple(tensor.stride())}")
        for one, other in combinations(writes, 2):
            if _overlap(one, other):
                raise RuleError(f"two results of {name} lie over one another")
        own = [tensor.detach().clone() for tensor in reads]
        kept = [(t, c) for t, c in zip(reads, own) if not any(_overlap(t, w) for w in writes)]
        results = [torch.empty_like(tensor.detach()) for tensor in writes]
        for tensor in writes:
            _spoil(tensor.detach())
        return _Operation(f"{name} in {self._name}", lambda: start(own, results), results,
                          list(writes), kept)  # fmt: skip

    # ---- first use, and the stream ----

    def _announce(self, edge: str) -> None:
        if edge not in self._met:
            self._store.set(f"met/{edge}/{self._own}", b"1")

    def _meet(self, edge: str, peers: Sequence[int]) -> None:
        """Block until the others have come to the first operation of this kind, too."""
        if edge in self._met or not peers:
            return
        self._announce(edge)
        try:
            self._store.wait([f"met/{edge}/{peer}" for peer in peers], FIRST_USE)
        except Exception as error:
            raise RuleError(
                f"rank {self._own} of {self._name} waits for ever in its first {edge}"
            ) from error
        self._met.add(edge)

    def _serve(self) -> None:
        while (together := self._stream.get()) is not None:
            by_name: dict[str, list[_Operation]] = {}
            for operation in together:
                by_name.setdefault(operation.name, []).append(operation)
            for own in by_name.values():
                threading.Thread(target=_run, args=(own,), daemon=True).start()
            for operation in together:  # what follows a future may run on in its thread
                operation.done.wait()


def _run(operations: Sequence[_Operation]) -> None:
    for operation in operations:
        operation.run()


def _into(results: list[torch.Tensor], own: _Tensors) -> list[torch.Tensor]:
    for result, tensor in zip(results, own, strict=True):
        result.copy_(tensor)
    return results


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def _described(tensors: _Tensors) -> str:
    return " ".join(f"{tensor.dtype}×{tensor.numel()}" for tensor in tensors)


_groups: list[RuledGroup] = []


def _made(options: Any, _: Any) -> RuledGroup:
    _groups.append(RuledGroup(options))
    return _groups[-1]


def _batched(transfers: Sequence[dist.P2POp]) -> list[dist.Work]:
    group: Any = transfers[0].group
    if not isinstance(group, RuledGroup):
        return list(_as_torch_does(list(transfers)))
    group.batch = []
    works = [started for started in _as_torch_does(list(transfers)) if started is not None]
    group.end_batch()
    return works


_as_torch_does = dist.batch_isend_irecv


def register() -> None:
    """Make the backend known to torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _made, extended_api=True, devices=["cpu"])


@contextmanager
def kept() -> Iterator[None]:
    """Run a job on groups of this backend; at its end, compare what its ranks have called.

    Enter after `init_process_group`, and leave before `destroy_process_group`.

    Raises:
        RuleError: the calls of ranks differ, or works were dropped.
    """
    try:
        with mock.patch.object(dist, "batch_isend_irecv", _batched):
            yield
        for group in _groups:
            _compare(group)
    finally:
        for group in _groups:
            group.close()
        _groups.clear()


def _compare(group: RuledGroup) -> None:
    """Check that all ranks of a group have called the same, in the same order.

    Raises:
        RuleError: they have not, or works of this rank were dropped.
    """
    if group.dropped:
        raise RuleError(f"dropped before they were waited for: {sorted(set(group.dropped))}")
    own, size = group.rank(), group.size()
    group._store.set(f"calls/{own}", json.dumps(group.log))
    for other in range(size):
        theirs = json.loads(group._store.get(f"calls/{other}"))
        edges = {f"{own}>{other}", f"{other}>{own}"}
        for kinds in ({None}, *({edge} for edge in edges)):
            mine, his = _calls(group.log, kinds), _calls(theirs, kinds)
            if mine != his and own != other:
                differ = next((a, b) for a, b in zip([*mine, None], [*his, None]) if a != b)
                raise RuleError(f"ranks {own} and {other} of {group.group_name} call {differ}")


def _calls(log: Sequence[str], edges: set[Any]) -> list[str]:
    """The transfers along some edges; with None, the collectives."""
    return [
        call
        for call in log
        if (call.split()[0] if ">" in call.split()[0] else None) in edges
    ]  # fmt: skip

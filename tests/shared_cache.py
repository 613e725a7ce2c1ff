"""Traces of models, trials of torch's optimizers and speeds, shared by the tests of a run.

Most tests need the trace of some small model without being about how it is made; what one of them
has traced, the others read, in whichever process they run. Likewise the splits and the memory of
segments: what one test has found in a process is known to the later ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from filelock import FileLock

from merak.core.files.private_files import write_own_file
from merak.graph.ir.ir import Segment
from merak.graph.segment.build import GraphSource
from merak.graph.tensor_parallel.search.auto_shard import (
    AutoSharder,
    SegmentSharding,
    SegmentTask,
    _carried_over,
    structure_of,
)
from merak.plan.cost import benchmark
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.segments.measured import MeasuredGraphs
from merak.plan.optimizer import findings
from merak.plan.optimizer.small_tensors import SmallTensor
from merak.plan.optimizer.trial import Findings

_OWN = None if "MERAK_CACHE" in os.environ else tempfile.TemporaryDirectory(prefix="merak-traces-")
FOLDER = Path(os.environ["MERAK_CACHE"] if _OWN is None else _OWN.name)
"""The run's own folder, which `tests/conftest.py` makes; of a benchmark, gone when that ends."""

_AS_IT_IS = GraphSource.__post_init__
_SPLIT, _MAKE_GRAPHS = AutoSharder.__call__, MeasuredGraphs.__init__
_MEMORY: dict[Any, Any] = {}

SPLITS: dict[Any, tuple[Segment, SegmentSharding]] = {}
"""Those that `share_found` remembers in this process, by the degree and what was searched."""


def share(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Store in the folder what is traced and measured, unless another one is named.

    Args:
        replace: sets an attribute: for ever, or as pytest's monkeypatch does.
    """
    measure, run_trial = benchmark._measure, findings.run_trial

    def in_the_folder(source: GraphSource) -> None:
        _AS_IT_IS(source)
        source.cache_dir = source.cache_dir or FOLDER

    def once_a_run(device: torch.device) -> DeviceProfile:
        path = FOLDER / f"profile-of-the-run-{device.type}.json"
        if not path.exists():
            write_own_file(path, benchmark.to_json(measure(device)).encode())
        return benchmark.from_json(path.read_text(), str(path))

    def tried_once_a_run(
        optimizer: torch.optim.Optimizer, tensors: Sequence[SmallTensor], device: torch.device
    ) -> Findings:
        if not type(optimizer).__module__.startswith("torch."):  # a test's own, of any behaviour
            return run_trial(optimizer, tensors, device)
        key = repr((type(optimizer), optimizer.defaults, tensors, device))
        path = FOLDER / f"trial-{hashlib.sha256(key.encode()).hexdigest()}"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                write_own_file(path, pickle.dumps(run_trial(optimizer, tensors, device)))
        found: Findings = pickle.loads(path.read_bytes())
        return found

    replace(GraphSource, "__post_init__", in_the_folder)
    replace(findings, "run_trial", tried_once_a_run)
    replace(benchmark, "_measure", once_a_run)


def share_found(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Remember the splits and the memory of segments that were found once in this process.

    Args:
        replace: as of `share`.
    """

    def known_split(sharder: AutoSharder, task: SegmentTask) -> SegmentSharding:
        key = tuple(structure_of(task))
        at = (sharder.degree, key)
        if at in SPLITS and key not in sharder._known:
            split = dataclasses.replace(_carried_over(*SPLITS[at], task.segment), like=task.segment)
            sharder._known[key] = (task.segment, split)
        found = _SPLIT(sharder, task)
        SPLITS.setdefault(at, sharder._known[key])
        return found

    def known_memory(graphs: MeasuredGraphs, found: Any = None) -> None:
        _MAKE_GRAPHS(graphs, _MEMORY if found is None else found)

    replace(AutoSharder, "__call__", known_split)
    replace(MeasuredGraphs, "__init__", known_memory)


@contextmanager
def not_shared() -> Iterator[None]:
    """Inside, every process traces by itself, as the user's do where no folder is named."""
    with mock.patch.object(GraphSource, "__post_init__", _AS_IT_IS):
        yield

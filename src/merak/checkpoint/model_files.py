"""Files of a Hugging Face folder: which tensor is in which file, and which rank writes each."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils import logging as bars

from merak.checkpoint.files import inner_files
from merak.checkpoint.peft_adapters import (
    adapter_keys,
    has_adapters,
    shown_to_peft,
    write_adapters,
)
from merak.checkpoint.pretrained.exchange import Exchange, Held, Step, Wait, no_status
from merak.checkpoint.pretrained.file_tensors import (
    FileTensor,
    State,
    check_saves,
    convert_back,
    file_tensors,
    meta_state,
)
from merak.checkpoint.pretrained.splitting import INDEX, split_files
from merak.checkpoint.pretrained.tensor_file import FileLayout, TensorFile, check_file, lay_out
from merak.checkpoint.writing import why_not_written
from merak.core.errors import SavingError
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.graph.weights.holders import TensorHolders, first_names, named_tensors
from merak.graph.weights.rank_agreement import is_distributed

LARGEST_FILE_BYTES = 5 * 10**9
SMALLEST_FILE_BYTES = 10**9
"""Bounds of a file's size: with many ranks files are smaller, so that all ranks write."""

OTHERS = "rank-00000.safetensors"
"""File of what a model's files do not hold as it is; further ones are numbered."""

_NEARLY_MOST = 0.9
"""The fraction of the most bytes of a file that a rank must hold to be its writer."""


@dataclass(frozen=True)
class ModelFiles:
    """Files of a Hugging Face folder, planned: the same on every rank.

    Args:
        model: the user's model.
        mesh: the grid of ranks.
        held: the model's tensors by first name, and the ranks that hold them.
        names: first name of every tensor of the state dict, by its key.
        tensors: of all files by key; empty for adapters, which peft writes.
        files: keys of the tensors of each file by its name.
        writers: the rank that writes each file.
        steps: what the writers need, in the order in which ranks exchange it.
        index: text of the file that says which tensor is in which file; None where there is one.
        shapes: state dict of a model with adapters on the meta device, which peft asks for.
        shown: such a model, for peft to write.
    """

    model: nn.Module = field(repr=False, compare=False)
    mesh: Mesh = field(repr=False, compare=False)
    held: Mapping[str, Held]
    names: Mapping[str, str]
    tensors: Mapping[str, FileTensor]
    files: Mapping[str, tuple[str, ...]]
    writers: Mapping[str, int]
    steps: tuple[Step, ...]
    index: str | None
    shapes: State = field(default_factory=dict, repr=False, compare=False)
    shown: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def are_adapters(self) -> bool:
        """Whether the adapters alone are written, by peft."""
        return bool(self.steps) and not self.tensors

    @cached_property
    def stored(self) -> Mapping[str, tuple[str, str]]:
        """File and key of every tensor of the model, by first name, that is stored as it is.

        Left out are those that transformers converts, and all of a model with adapters.
        """
        found: dict[str, tuple[str, str]] = {}
        for file, keys in self.files.items():
            for key in keys:
                tensor = self.tensors[key]
                if not tensor.converted:
                    found.setdefault(self.names[tensor.sources[0]], (file, key))
        return found

    @cached_property
    def layouts(self) -> Mapping[str, FileLayout]:
        """Header and size of every file."""
        return {
            file: lay_out({key: self.tensors[key].meta for key in keys})
            for file, keys in self.files.items()
        }

    def needed(self) -> list[str]:
        """Names of the tensors that this rank writes or sends."""
        rank, mesh = self.mesh.rank, self.mesh
        names = ((step.writer, name) for step in self.steps for name in step.sources)
        needed = {n for writer, n in names if rank in self.held[n].senders(writer, mesh)}
        return sorted(needed)

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        group: dist.ProcessGroup | None = None,
        *,
        wait: Wait = no_status,
        target: Path | None = None,
    ) -> list[str]:
        """Write the files that this rank is the writer of, synced to disk; collective.

        It may run in a thread, with a group of its own and copies of the tensors.

        Args:
            tensors: this rank's tensors, or its shards of them, by first name.
            folder: where to write; the files must not be there yet.
            group: of gloo, of all ranks; None for the default group, in the main thread alone.
            wait: entered around waits for other ranks.
            target: the folder that messages name.

        Returns:
            Names of the files that this rank has written, in their order.

        Raises:
            SavingError: a rank could not write, on every rank.
        """
        exchange = Exchange(self.held, tensors, self.mesh, group, wait)
        target = target or folder
        what = "adapters" if self.are_adapters else "model"
        together = partial(_agree, what, target, group, wait)
        together(exchange.missing(self.steps))
        output = (_Adapters if self.are_adapters else _Files)(self, folder)
        failure: str | None = None
        for step, state in exchange.walk(self.steps):
            if failure is None:  # else the others' transfers go on, and come to nothing
                failure = attempt(partial(output.write, step, state), target)
            state.clear()
        failure = attempt(output.close, target) if failure is None else failure
        output.abandon()
        together(failure)
        return output.written

    def write_companions(self, folder: Path) -> None:
        """Write what is beside the weights: config, generation config, code, and the index.

        One rank does it, in its main thread: the config takes the dtype of the live model.

        Args:
            folder: where to write.
        """
        if isinstance(self.model, PreTrainedModel):
            aside = folder / ".companions"  # in `folder` it would remove files of weights
            with without_bars():  # of weights, of which there are none here
                self.model.save_pretrained(aside, state_dict={})
            (aside / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
            for path in aside.iterdir():
                path.rename(folder / path.name)
            aside.rmdir()
        if self.index is not None:
            (folder / INDEX).write_text(self.index, encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Compare the header and the size of every file with the plan.

        Args:
            folder: where they are.

        Raises:
            OSError: a file is missing, cut off or another one.
        """
        for file, layout in self.layouts.items():
            check_file(folder / file, layout)


def plan_model_files(
    model: nn.Module,
    holdings: Mapping[str, TensorHolders],
    mesh: Mesh,
    max_shard_size: int | str | None = None,
    writers: Collection[int] | None = None,
) -> ModelFiles:
    """Plan the files of a Hugging Face folder, without communication.

    A transformers model has the files of its own `save_pretrained`; one of peft's the adapters
    alone; any other module its state dict. A file's writer is one of the ranks that hold most of
    it, so that little is sent, and all replicas share the files.

    Args:
        model: the user's model, with or without weights.
        holdings: the holders of its tensors, the same on all ranks.
        mesh: the grid of ranks.
        max_shard_size: the most that one file holds, in bytes or as "5GB"; by default 5 GB, and
            less where otherwise ranks would have no file to write, down to 1 GB.
        writers: the ranks that can write into the folder; all by default.

    Raises:
        WeightsError: a parameter that no rank holds, or a model that cannot be written.
    """
    check_saves(model)
    state = meta_state(model, holdings)
    firsts = first_names(named_tensors(model))
    names = {key: firsts[key] for key in state}
    held = _held(model, holdings, names.values())
    ranks = sorted(set(range(mesh.world_size) if writers is None else writers))
    if has_adapters(model):
        needed = adapter_keys(model, state)
        steps = [_step(held, names, ranks[0], "", (key,), (key,)) for key in needed]
        shown = shown_to_peft(model)
        return ModelFiles(model, mesh, held, names, {}, {}, {}, tuple(steps), None, state, shown)
    tensors = file_tensors(model, state)
    return _planned(model, mesh, held, names, tensors, ranks, max_shard_size, SAFE_WEIGHTS_NAME)


def plan_other_files(
    files: ModelFiles, holdings: Mapping[str, TensorHolders], writers: Collection[int]
) -> ModelFiles:
    """Plan the files of those tensors of a state dict that the model's files do not hold as it is.

    Args:
        files: of the model.
        holdings: the holders of its tensors, as of `plan_model_files`.
        writers: the ranks that can write into the folder.
    """
    names = {name: name for name in sorted(holdings) if name not in files.stored}
    held = _held(files.model, holdings, names)
    tensors = {
        name: FileTensor(TensorMeta(one.holders.shape, one.holders.dtype), (name,), False)
        for name, one in held.items()
    }
    ranks = sorted(writers)
    planned = _planned(files.model, files.mesh, held, names, tensors, ranks, None, OTHERS)
    return replace(planned, index=None)


def _held(
    model: nn.Module, holdings: Mapping[str, TensorHolders], names: Iterable[str]
) -> dict[str, Held]:
    """The holders of some tensors by first name, and whether all replicas hold the same."""
    firsts = first_names(named_tensors(model))
    parameters = {firsts[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: Held(holdings[name], name in parameters) for name in sorted(names)}


def _planned(  # what is known of a folder, one after another
    model: nn.Module,
    mesh: Mesh,
    held: Mapping[str, Held],
    names: Mapping[str, str],
    tensors: Mapping[str, FileTensor],
    ranks: list[int],
    max_shard_size: int | str | None,
    name: str,
) -> ModelFiles:
    """Plan the files of some tensors, which are named after a first one."""
    if not tensors:
        return ModelFiles(model, mesh, held, names, {}, {}, {}, (), None)
    metas = {key: tensor.meta for key, tensor in tensors.items()}
    largest = max_shard_size or _largest_file(tensors, len(ranks))
    files, index = split_files(metas, largest, name)
    for_files = {
        file: [names[source] for key in keys for source in tensors[key].sources]
        for file, keys in files.items()
    }
    chosen = _choose_writers(for_files, held, mesh, ranks)
    by_writer: defaultdict[int, list[Step]] = defaultdict(list)
    for file, keys in files.items():
        for together in _groups(keys, tensors):
            sources = tensors[together[0]].sources
            by_writer[chosen[file]].append(
                _step(held, names, chosen[file], file, together, sources)
            )
    steps = _interleave(by_writer)
    return ModelFiles(model, mesh, held, names, tensors, files, chosen, tuple(steps), index)


def _largest_file(tensors: Mapping[str, FileTensor], num_ranks: int) -> int:
    """The most bytes of a file for which all ranks have one to write, within bounds."""
    total = sum(tensor.meta.num_bytes for tensor in tensors.values())
    return min(max(-(-total // num_ranks), SMALLEST_FILE_BYTES), LARGEST_FILE_BYTES)


def _groups(keys: Iterable[str], tensors: Mapping[str, FileTensor]) -> Iterator[tuple[str, ...]]:
    """Keys of a file that are written together: those that one conversion makes."""
    made: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        tensor = tensors[key]
        made.setdefault(tensor.sources if tensor.converted else (key, ""), []).append(key)
    yield from map(tuple, made.values())


def _step(
    held: Mapping[str, Held],
    names: Mapping[str, str],
    writer: int,
    file: str,
    keys: tuple[str, ...],
    sources: Iterable[str],
) -> Step:
    wanted = tuple(dict.fromkeys(names[source] for source in sources))
    return Step(writer, file, keys, wanted, sum(held[name].num_bytes() for name in wanted))


def _choose_writers(
    files: Mapping[str, list[str]], held: Mapping[str, Held], mesh: Mesh, ranks: list[int]
) -> dict[str, int]:
    """The writer of each file: of the ranks that hold most of it, the one with least to write."""
    load: Counter[int] = Counter()
    chosen: dict[str, int] = {}
    for file, names in files.items():
        holds: Counter[int] = Counter()
        num_bytes = 0
        for name in dict.fromkeys(names):
            size = held[name].num_bytes()
            num_bytes += size
            for rank in _ranks_with(held[name], mesh):
                holds[rank] += size
        most = max(holds[rank] for rank in ranks)
        eligible = [rank for rank in ranks if holds[rank] >= _NEARLY_MOST * most]
        chosen[file] = min(eligible, key=lambda rank: (load[rank], rank))
        load[chosen[file]] += num_bytes
    return chosen


def _ranks_with(held: Held, mesh: Mesh) -> Iterable[int]:
    """The ranks that hold a tensor or a shard of it."""
    if not held.replicated:
        return held.holders.ranks
    size = mesh.replicas * mesh.tp
    first = held.holders.ranks[0] // size * size
    return range(first, first + size)


def _interleave(by_writer: Mapping[int, list[Step]]) -> list[Step]:
    """Order all steps so that all writers come as far in the same time."""
    placed: list[tuple[int, int, int, Step]] = []
    for writer, steps in by_writer.items():
        before = 0
        for step in steps:
            placed.append((before, writer, len(placed), step))
            before += step.num_bytes
    return [step for *_, step in sorted(placed, key=lambda entry: entry[:3])]


class _Files:
    """The files that this rank writes, of which one is open at a time."""

    def __init__(self, plan: ModelFiles, folder: Path) -> None:
        self.written: list[str] = []
        self._plan = plan
        self._folder = folder
        self._open: TensorFile | None = None

    def write(self, step: Step, state: State) -> None:
        """Write the tensors of a step, by the model's names."""
        if not self.written or self.written[-1] != step.file:
            self.close()
            layout = self._plan.layouts[step.file]
            self._open = TensorFile(self._folder / step.file, layout)
            self.written.append(step.file)
        assert self._open is not None
        first = self._plan.tensors[step.keys[0]]
        sources = {key: state[self._plan.names[key]] for key in first.sources}
        made = {step.keys[0]: sources[first.sources[0]]}
        if first.converted:
            with torch.no_grad():
                made = convert_back(self._plan.model, sources)
        for key in step.keys:
            self._open.write(key, made.pop(key))

    def close(self) -> None:
        """Sync and check the file that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None
            name = self.written[-1]
            check_file(self._folder / name, self._plan.layouts[name])

    def abandon(self) -> None:
        """Close what a failure has left open."""
        if self._open is not None:
            self._open.abandon()
            self._open = None


class _Adapters:
    """The adapters, which one rank collects and peft writes."""

    def __init__(self, plan: ModelFiles, folder: Path) -> None:
        self.written: list[str] = []
        self._plan = plan
        self._folder = folder
        self._state: State = {}

    def write(self, step: Step, state: State) -> None:
        """Take the tensors of a step."""
        self._state.update({key: state[self._plan.names[key]] for key in step.keys})

    def close(self) -> None:
        """Let peft write what was collected."""
        if not self._state:
            return
        before, shown = set(inner_files(self._folder)), self._plan.shown
        assert shown is not None
        write_adapters(shown, {**self._plan.shapes, **self._state}, self._folder)
        self.written = sorted(set(inner_files(self._folder)) - before)

    def abandon(self) -> None:
        """Forget what was collected."""
        self._state.clear()


def attempt(step: Callable[[], object], target: Path) -> str | None:
    """Run a step; returns the reason of its failure, which the other ranks must learn.

    Args:
        step: what may fail.
        target: the folder that is written.
    """
    try:
        step()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        return why_not_written(error, target) or reason
    return None


def _agree(
    what: str, target: Path, group: dist.ProcessGroup | None, wait: Wait, failure: str | None
) -> None:
    """Raise the first failure of any rank, on all ranks."""
    failures = [failure]
    if is_distributed():
        peers = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        failures *= dist.get_world_size()
        with wait("what to save on", tuple(peers)):
            dist.all_gather_object(failures, failure, group=group)
    found = next((one for one in failures if one is not None), None)
    if found is not None:
        raise SavingError(f"The {what} could not be saved in {target}: {found}.")


@contextmanager
def without_bars() -> Iterator[None]:
    """Context in which transformers shows no progress bars."""
    if not bars.is_progress_bar_enabled():
        yield
        return
    with warnings.catch_warnings():  # that the user's environment has the last word
        warnings.simplefilter("ignore")
        bars.disable_progress_bar()
        try:
            yield
        finally:
            bars.enable_progress_bar()

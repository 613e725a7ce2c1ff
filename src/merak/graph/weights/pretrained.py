"""Pretrained models without weights: which tensors of a checkpoint make each parameter.

Inside `merak.empty_weights`, transformers' own `from_pretrained` finds the files, the config and
the class, and builds the model; only the step that reads the weights is another. It reads the names
and shapes in the files' headers, renames them as transformers does, and notes on the tape that the
parameter's numbers are to be read from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from merak.core.errors import WeightsError
from merak.core.rank0 import warn_on_rank0
from merak.graph.weights.deferred_init import InitRecorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a checkpoint's index: one tensor.

    Args:
        file: the safetensors file.
        key: its name there.
        shape: sizes of its dims.
        dtype: its element type.
    """

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of a checkpoint that transformers turns into other tensors of the model.

    Args:
        converter: transformers' converter.
        first_name: the parameter it is called for.
        entries: what it reads, each with the pattern that it matched.
        model: the model it is for.
    """

    converter: WeightConverter
    first_name: str
    entries: tuple[tuple[str, Entry], ...]
    model: PreTrainedModel

    def run(self, read: Callable[[Entry], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that the conversion yields, by their names in the model."""
        converter = deepcopy(self.converter)
        for pattern, entry in self.entries:
            converter.collected_tensors[pattern].append(partial(read, entry))  # type: ignore[arg-type]
        made = converter.convert(self.first_name, model=self.model, config=self.model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Tensor of a checkpoint; called, it reads its values into a real tensor.

    Args:
        name: its name in the pretrained model.
        source: the tensor of the checkpoint it is, or the conversion that yields it.
    """

    name: str
    source: Entry | Conversion

    def __call__(self, tensor: torch.Tensor) -> None:
        """Read the full tensor into a real tensor of its shape."""
        tensor.copy_(self.read())

    def read(self, dim: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """Values on the CPU, in the checkpoint's dtype, of a slice alone where the file allows.

        Args:
            dim: the dim of `ranges`.
            ranges: the (start, stop) intervals along `dim` to read, in order; all when None.
        """
        if isinstance(self.source, Conversion):
            whole = self.source.run(read_entry)[self.name]
            if ranges is None:
                return whole
            return torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim=dim)
        if ranges is None:
            return read_entry(self.source)
        with safe_open(self.source.file, framework="pt") as file:
            lazy = file.get_slice(self.source.key)
            before = (slice(None),) * dim
            return torch.cat([lazy[(*before, slice(a, b))] for a, b in ranges], dim=dim)


def read_entry(entry: Entry) -> torch.Tensor:
    """Full tensor of a checkpoint, in memory of its own."""
    with safe_open(entry.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(entry.key)
        return tensor.clone()


@contextmanager
def skeletons(recorder: InitRecorder) -> Iterator[None]:
    """Patch of `from_pretrained` that builds models without reading their weights."""
    original = PreTrainedModel.__dict__["get_init_context"].__func__

    def get_init_context(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> list[Any]:
        contexts = original(cls, *args, **kwargs)
        return [context for context in contexts if not isinstance(context, torch.device)]

    def load(
        model: PreTrainedModel,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> tuple[LoadStateDictInfo, None]:
        _refuse_what_is_not_streamed(state_dict, checkpoint_files, load_config, expected_keys)
        assert checkpoint_files is not None
        with recorder.paused():
            mapping = load_config.weight_mapping or []
            found = _find(model, read_headers(checkpoint_files), mapping)
        used = [conversion for conversion in mapping if conversion.was_used()]
        setattr(model, "_weight_conversions", used)  # noqa: B010, save_pretrained turns them round
        _apply_dtypes(model, load_config.dtype_plan)
        return _note(model, found, recorder, load_config.ignore_mismatched_sizes), None

    with ExitStack() as stack:
        for name, replacement in (
            ("get_init_context", classmethod(get_init_context)),
            ("_load_pretrained_model", staticmethod(load)),
            ("_finalize_model_loading", staticmethod(_finish)),
        ):
            stack.enter_context(mock.patch.object(PreTrainedModel, name, replacement))
        yield


def _refuse_what_is_not_streamed(
    state_dict: Any, files: list[str] | None, load_config: Any, expected_keys: list[str] | None
) -> None:
    name = load_config.pretrained_model_name_or_path
    problem = None
    if expected_keys is not None:
        problem = "an adapter is loaded into it; load the base model, add the adapter afterwards"
    elif load_config.hf_quantizer is not None:
        problem = "its weights are quantised; use a checkpoint in a floating point dtype"
    elif load_config.device_map is not None:
        problem = "device_map= places whole modules; leave it out, Merak places the parameters"
    elif state_dict is not None or not files:
        problem = "its weights are not in files; pass the name of a folder that has them"
    elif not all(file.endswith(".safetensors") for file in files):
        problem = f"{files[0]} is not a safetensors file; save the model again with save_pretrained"
    if problem:
        raise WeightsError(f"{name!r} cannot be opened under merak.empty_weights: {problem}.")


def read_headers(files: Sequence[str]) -> list[Entry]:
    """Entries of safetensors files, read from their headers."""
    entries = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                lazy = file.get_slice(key)
                dtype = str_to_torch_dtype[lazy.get_dtype()]
                entries.append(Entry(path, key, tuple(lazy.get_shape()), dtype))
    return sorted(entries, key=lambda entry: core_model_loading.dot_natural_key(entry.key))


def stored_tensors(
    model: PreTrainedModel, entries: Sequence[Entry]
) -> tuple[dict[str, CheckpointTensor], dict[str, tuple[int, ...]], set[str]]:
    """Find what a checkpoint's files have for a model, renamed as `from_pretrained` does.

    Args:
        model: with or without weights; it is left as it is.
        entries: of the files; see `read_headers`.

    Returns:
        Tensors and their shapes by name in the model, and keys that it has no place for.
    """
    found = _find(model, entries, get_model_conversion_mapping(model))
    return found.stored, found.shapes, found.unexpected


@dataclass(frozen=True, slots=True)
class _Found:
    """Tensors that a checkpoint has for a model.

    Args:
        stored: name in the model → its numbers.
        shapes: their shapes.
        unexpected: keys that the model has no place for.
    """

    stored: dict[str, CheckpointTensor]
    shapes: dict[str, tuple[int, ...]]
    unexpected: set[str]


def _find(model: PreTrainedModel, entries: Sequence[Entry], mapping: Sequence[Any]) -> _Found:
    """Rename and group a checkpoint's keys as `from_pretrained` does."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    expected = model.state_dict()
    groups: dict[str, list[tuple[str, Entry]]] = {}
    found = _Found({}, {}, set())
    for entry in entries:
        name, pattern = _rename(entry.key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected:
            found.unexpected.add(name)
        elif pattern is None:
            found.stored[name] = CheckpointTensor(name, entry)
            found.shapes[name] = entry.shape
        else:
            groups.setdefault(name, []).append((pattern, entry))
    for name, members in groups.items():
        conversion = Conversion(by_pattern[members[0][0]], name, tuple(members), model)
        for target, shape in _try(conversion).items():
            found.stored[target] = CheckpointTensor(target, conversion)
            found.shapes[target] = shape
    return found


def _rename(
    key: str,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    prefix: str,
    expected: dict[str, torch.Tensor],
) -> tuple[str, str | None]:
    rename = core_model_loading.rename_source_key
    name, pattern = rename(key, renamings, converters, prefix, expected)
    if name not in expected and key in expected:
        name, pattern = rename(key, [], [], base_model_prefix=prefix, meta_state_dict=expected)
    return name, pattern


def _try(conversion: Conversion) -> dict[str, tuple[int, ...]]:
    """Shapes that a conversion yields, found on fake tensors."""

    def without_numbers(entry: Entry) -> torch.Tensor:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    try:
        return {name: tuple(t.shape) for name, t in conversion.run(without_numbers).items()}
    except Exception as error:
        entry = conversion.entries[0][1]
        raise WeightsError(
            f"{entry.key} of {entry.file} is converted for {conversion.first_name} in a way that "
            f"cannot be done part by part ({error}); load the model normally, save it with "
            "save_original_format=False, and use that folder."
        ) from error


def _apply_dtypes(model: PreTrainedModel, plan: Mapping[str, torch.dtype] | None) -> None:
    """Keep in fp32 what transformers keeps in fp32."""
    if not plan:
        return
    pattern, key_by_group, _ = core_model_loading.build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(plan[key_by_group[match.lastgroup]])


def _note(
    model: PreTrainedModel, found: _Found, recorder: InitRecorder, ignore_mismatched: bool
) -> LoadStateDictInfo:
    """Record the checkpoint's parameters on the tape, and read buffers, which are real, at once."""
    expected = dict(model.state_dict(keep_vars=True))
    mismatched: set[Any] = set()
    for name, stored in found.stored.items():
        tensor = expected[name]
        if found.shapes[name] != tuple(tensor.shape):
            mismatched.add((name, found.shapes[name], tuple(tensor.shape)))
            continue
        recorder.call(stored, tensor.data, is_random=False)
    if mismatched and not ignore_mismatched:
        name, there, here = min(mismatched)
        raise WeightsError(
            f"{name} has shape {there} in the checkpoint and {here} in the model; pass the "
            "config it was saved with, or ignore_mismatched_sizes=True to initialise it anew."
        )
    _tie(model, found)
    return LoadStateDictInfo(
        missing_keys=expected.keys() - found.stored.keys(),
        unexpected_keys=found.unexpected,
        mismatched_keys=mismatched,
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _tie(model: PreTrainedModel, found: _Found) -> None:
    """Tie what the config ties, unless the checkpoint has two different tensors for it."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in found.stored or source not in found.stored:
            continue
        if torch.equal(found.stored[target].read(), found.stored[source].read()):
            del found.stored[target]
            continue
        del model.all_tied_weights_keys[target]
        warn_on_rank0(
            logger,
            "The config ties %s to %s, but the checkpoint has different values for them: they are "
            "not tied. Set tie_word_embeddings=False in the config to say so.",
            *(target, source),
        )


def _finish(
    model: PreTrainedModel, load_config: Any, loading_info: LoadStateDictInfo
) -> LoadStateDictInfo:
    """Tie the parameters and report what the checkpoint lacks, as transformers does."""
    model.tie_weights(missing_keys=loading_info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(loading_info)
    log_state_dict_report(
        model=model,
        pretrained_model_name_or_path=load_config.pretrained_model_name_or_path,
        ignore_mismatched_sizes=load_config.ignore_mismatched_sizes,
        loading_info=loading_info,
        logger=logger,
    )
    return loading_info

"""Example columns from a model's own documentation of its forward's arguments."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from merak.zoo.batches.columns import Column
from merak.zoo.configs.field_names import IMAGE_CHANNELS
from merak.zoo.configs.fields import inner_configs, is_count

UNSAID = 4
"""The size of a dimension that neither the documentation nor the config gives a number."""

DEFAULT_WAVE = 7680
"""Numbers of a recording where the config does not say how many make a frame."""

DEFAULT_PATCH = 16
"""Pixels of a patch's side where the config does not say."""

_ARGUMENT = re.compile(r"^\s*(\w+) \(`?[^:`]*?(\w*)Tensor`? of shape ([^:]*?)\):\s*$", re.MULTILINE)
_LOSS = re.compile(r"^- \*\*loss\*\* .*?returned when (.*?) (?:is|are) provided", re.MULTILINE)
_SERIES = re.compile(
    r"^\s*(\w+) \(`[^`]*(?:Sequence|[Ll]ist)\[torch\.Tensor\]`[^)]*\):\s[^:]*?"
    r"\bEach tensor is a 1D ",
    re.MULTILINE,
)
_SHAPE = re.compile(r"\(([^()]*)\)")
_BATCH = re.compile(r"(batch|batch_size|bs)")
_SEQUENCE = re.compile(r"(seq_length|seq_len|sequence_length)$")
_SIDE = re.compile(r"(^height$|^width$|^(image|frame)_size$)")
_PATCHES = re.compile(r"(^num_patches|_num_patches)$")
_WAVE = re.compile(r"^(audio|wave\w*)_length$")
_MASK = re.compile(r"mask$")
_PREDICTED = ("prediction_length", "horizon_length")


class Kind(Enum):
    """Kind of the values of a column."""

    REAL = "any numbers"
    WHOLE = "whole numbers"
    SWITCH = "true and false"


@dataclass(frozen=True, slots=True)
class Described:
    """Argument that takes a tensor, as the documentation describes it.

    Args:
        name: the argument's.
        kind: what numbers it holds.
        sizes: a word or a number for every dimension.
    """

    name: str
    kind: Kind
    sizes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """Sizes that are known beside those of the config.

    Args:
        sequence: tokens of a sequence.
        image: pixels of an image's sides.
        vocabulary: different tokens.
    """

    sequence: int
    image: tuple[int, int]
    vocabulary: int


def described(model_class: type[PreTrainedModel]) -> dict[str, Described]:
    """Parse the documented shapes of tensors that a model's forward takes, by name."""
    taken = inspect.signature(model_class.forward).parameters
    text = inspect.getdoc(model_class.forward) or ""
    return {found.name: found for found in _arguments(text) if found.name in taken}


def _arguments(text: str) -> Iterator[Described]:
    for match in _SERIES.finditer(text):  # a tensor of rows is a sequence of them, too
        yield Described(match[1], Kind.REAL, ("batch_size", "sequence_length"))
    for match in _ARGUMENT.finditer(text):
        name, tensor, shapes = match.groups()
        ways = [_words(shape) for shape in _SHAPE.findall(shapes)]
        # Batches are split into samples, so of several ways one that counts nothing but them first.
        sizes = next((words for words in ways if words and _BATCH.fullmatch(words[0])), ())
        if sizes:
            yield Described(name, _kind(name, tensor), sizes)


def _words(shape: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in shape.split(",") if word.strip())


def _kind(name: str, tensor: str) -> Kind:
    if tensor == "Bool":
        return Kind.SWITCH
    is_whole = tensor in ("Long", "Int") or name.endswith("_ids") or _MASK.search(name)
    return Kind.WHOLE if is_whole else Kind.REAL


def documented_column(argument: Described, config: PreTrainedConfig, known: Known) -> Column:
    """Make a column of one sample for an argument.

    Args:
        argument: what the documentation says.
        config: the model's config, which numbers many of the sizes.
        known: further sizes.
    """
    shape = tuple(_size(word, argument.name, config, known) for word in argument.sizes)
    is_switch = argument.kind is Kind.SWITCH
    if argument.kind is Kind.REAL:
        return Column(shape)
    if _MASK.search(argument.name):  # nothing is masked out
        return Column(shape, 1, first=1, is_switch=is_switch)
    if is_switch:
        return Column(shape, 2, interleaved=True, is_switch=True)
    if "position" in argument.name:
        return Column(shape, shape[-1], interleaved=True)
    if "input_ids" in argument.name:
        return Column(shape, known.vocabulary)
    return Column(shape, 1 if "type_ids" in argument.name else 2)


def _size(words: str, name: str, config: PreTrainedConfig, known: Known) -> int:
    """Compute a dimension's size, of products such as `height * width` too."""
    size = 1
    for word in words.split("*"):
        size *= _factor(_plain(word), name, config, known)
    return size


def _plain(word: str) -> str:
    """Normalize a size's name: `config.num_labels` and `number of labels` are `num_labels`."""
    field = word.strip().rpartition("config.")[2]
    return re.sub(r"^number_of_", "num_", field.replace(" ", "_"))


def _factor(word: str, name: str, config: PreTrainedConfig, known: Known) -> int:
    if word.isdecimal():
        return int(word)
    if _BATCH.fullmatch(word):
        return 1
    if _SIDE.search(word):
        return known.image[word == "width"]
    if _SEQUENCE.search(word):
        return _series(name, config) or known.sequence
    if _WAVE.search(word):
        return DEFAULT_WAVE
    fields = IMAGE_CHANNELS if word in IMAGE_CHANNELS else (word,)
    found = next((n for field in fields for n in _numbers(config, field)), None)
    if found is not None:
        return found
    if _PATCHES.search(word):
        patch = next(_numbers(config, "patch_size"), DEFAULT_PATCH)
        return (known.image[0] // patch) * (known.image[1] // patch)
    return _of_its_kind(word, name, config)


def _of_its_kind(word: str, name: str, config: PreTrainedConfig) -> int:
    """Find a size that the config names after the argument: `num_time_features` of past ones."""
    if word.endswith("_len") and (predicted := _series("future", config)):
        return predicted
    parts = name.split("_")
    named = (f"num_{'_'.join(parts[start:])}" for start in range(len(parts)))
    return next((n for field in named for n in _numbers(config, field)), UNSAID)


def _series(name: str, config: PreTrainedConfig) -> int | None:
    """Return the length of a part of a series, past or future, for models that forecast."""
    if name.startswith("future"):
        return next((n for field in _PREDICTED for n in _numbers(config, field)), None)
    context = next(_numbers(config, "context_length"), None)
    if context is None or not name.startswith("past"):
        return None
    return context + max(map(int, getattr(config, "lags_sequence", None) or [0]))


def _numbers(config: PreTrainedConfig, field: str) -> Iterator[int]:
    """Collect the integer values of a field, of nested configs too."""
    value: Any = getattr(config, field, None)
    if is_count(value):
        yield value
    for _, inner in inner_configs(config):
        yield from _numbers(inner, field)


def loss_givers(model_class: type[PreTrainedModel]) -> list[str]:
    """Return the tensors for which a model documents that it returns a loss.

    Args:
        model_class: the architecture.
    """
    text = _LOSS.search(inspect.getdoc(model_class.forward) or "")
    named = re.findall(r"`(\w+)`", text[1]) if text else []
    return [name for name in described(model_class) if name in named]


def is_target(name: str) -> bool:
    """Whether an argument is a target of the model rather than an input."""
    words = name.split("_")
    return bool({"label", "labels", "target", "targets"} & set(words)) or name == "future_values"


def names_in_error(error: BaseException, names: Iterable[str]) -> list[str]:
    """Find the names that an error mentions: in its message, else in the line that raised it.

    Args:
        error: what the model failed with.
        names: what it may ask for.
    """
    texts = [str(error), *_lines(error)]
    for text in texts:
        words = set(re.findall(r"\w+", text))
        if found := [name for name in names if name in words]:
            return found
    return []


def _lines(error: BaseException) -> Iterator[str]:
    """List the source lines of an error's traceback, the innermost first."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
        yield "".join(linecache.getlines(frame.filename)[first - 1 : last])


def with_companions(targets: Collection[str], names: Collection[str]) -> list[str]:
    """Add the arguments that go with targets, as `future_time` does with `future_values`."""
    kinds = {target.split("_")[0] for target in targets if "_" in target}
    return [name for name in names if name in targets or name.split("_")[0] in kinds]

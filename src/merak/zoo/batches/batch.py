"""Example batches of a transformers model, by its class and config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from merak.core.errors import CommandError
from merak.zoo.batches.columns import Column, Columns
from merak.zoo.batches.documented import DEFAULT_WAVE, Known, described, documented_column
from merak.zoo.configs.field_names import IMAGE_CHANNELS, IMAGES
from merak.zoo.configs.fields import most_positions, text_part

DEFAULT_SEQUENCE = 512
"""Tokens of a sequence where neither the user nor the model says less."""

DEFAULT_IMAGE = 224
"""Pixels of an image's side where the config does not say."""

SUBSAMPLING = 8
"""Frames of sound that a model which subsamples them makes one of, at the most."""

DEFAULT_VOCABULARY = 128
"""Different characters, for models that read them without a vocabulary."""

DEFAULT_CHOICES = 2
"""Answers to choose from, in multiple-choice models."""


class Task(Enum):
    """Task of a model: the kind of its labels."""

    TOKENS = "a word for every token"
    TAGS = "a class for every token"
    SAMPLES = "a class for every sample"
    CHOICES = "the right one of several sequences"
    PIXELS = "a class for every pixel"
    ORDER = "whether the second sentence follows the first"
    SPEECH = "fewer characters than a recording has frames"


TASKS: Mapping[Task, tuple[Mapping[str, str | Sequence[str]], ...]] = MappingProxyType(
    {
        Task.SAMPLES: (
            auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES,
            auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
        ),
        Task.TAGS: (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,),
        Task.CHOICES: (auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,),
        Task.PIXELS: (auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,),
        Task.SPEECH: (auto.MODEL_FOR_CTC_MAPPING_NAMES,),
        Task.ORDER: (auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,),
    }
)
"""transformers' own lists of the models of each task; the rest predict tokens."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    batch: int
    sequence: int
    task: Task
    config: PreTrainedConfig

    @property
    def vocabulary(self) -> int:
        size = getattr(text_part(self.config), "vocab_size", None)
        return size if isinstance(size, int) else DEFAULT_VOCABULARY

    @property
    def known(self) -> Known:
        return Known(self.sequence, self.image, self.vocabulary)

    @property
    def image(self) -> tuple[int, int]:
        size = visual_field(self.config, DEFAULT_IMAGE, *IMAGES)
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        if isinstance(size, (tuple, list)):
            return int(size[0]), int(size[-1])
        return int(size), int(size)


def example_columns(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    batch: int = 1,
    sequence: int | None = None,
) -> dict[str, Column]:
    """Make the columns of a batch to trace or train a model with: inputs and labels.

    Args:
        model_class: the architecture.
        config: its config.
        batch: samples.
        sequence: tokens of a sequence; the model's longest, up to 512, where it is None.

    Returns:
        The columns by the names of the forward's arguments.

    Raises:
        CommandError: sizes that do not fit the model, or a model of another kind of input.
    """
    if batch < 1:
        raise CommandError(f"--batch {batch} has no samples; use 1 or more.")
    sizes = _Sizes(batch, _sequence(config, sequence), _task(model_class), config)
    taken = inspect.signature(model_class.forward).parameters
    main = _main_input(model_class, taken)
    columns = _made(model_class, [main, *_required(model_class)], sizes)
    if example_arguments(model_class):  # a loss of pairs, of which the main input is one half
        columns |= {name: make(sizes) for name, make in INPUTS.items() if name in taken}
    if "decoder_input_ids" in taken and not _shifts_labels(config):
        columns["decoder_input_ids"] = _token_ids(sizes)
    for name, make in TARGETS.items():
        if name in taken:
            columns[name] = make(sizes)
    return columns


def _main_input(model_class: type[PreTrainedModel], taken: Mapping[str, object]) -> str:
    """Return the main input of a model, or another argument in its place."""
    main = model_class.main_input_name
    found = next((name for name in (main, *INPUTS) if name in INPUTS and name in taken), main)
    if found not in INPUTS and found not in described(model_class):
        raise CommandError(
            f"{model_class.__name__} takes {main}, for which there is no example batch; "
            f"models that take {' or '.join(INPUTS)}, or whose documentation says the shape of "
            "what they take, have one."
        )
    return found


def _required(model_class: type[PreTrainedModel]) -> Iterator[str]:
    """Return the required arguments of a model's forward."""
    empty = inspect.Parameter.empty
    _, *taken = inspect.signature(model_class.forward).parameters.values()
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    yield from (p.name for p in taken if p.default is empty and p.kind not in varying)


def _made(model_class: type[PreTrainedModel], names: Collection[str], sizes: _Sizes) -> Columns:
    """Make columns for arguments, of those that are known or documented."""
    documented = _described_columns(model_class, names, sizes)
    known = {name: INPUTS[name](sizes) for name in names if name in INPUTS}
    return {name: (documented | known)[name] for name in names if name in documented | known}


def _described_columns(
    model_class: type[PreTrainedModel], names: Collection[str], sizes: _Sizes
) -> Columns:
    documented = described(model_class)
    columns = {
        name: documented_column(documented[name], sizes.config, sizes.known)
        for name in names
        if name in documented
    }
    return {n: replace(c, shape=(sizes.batch, *c.shape[1:])) for n, c in columns.items()}


def requested_columns(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sequence: int,
    names: Collection[str],
) -> Columns:
    """Make columns of one sample for arguments that a model's forward turns out to need."""
    return _made(model_class, names, _Sizes(1, sequence, _task(model_class), config))


def documented_columns(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sequence: int,
    names: Collection[str],
) -> Columns:
    """Make columns of one sample for arguments of a model's forward, as it documents them."""
    return _described_columns(model_class, names, _Sizes(1, sequence, _task(model_class), config))


def further_inputs(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, sequence: int
) -> Columns:
    """Make columns of one sample for all inputs of a model but the main one."""
    sizes = _Sizes(1, sequence, _task(model_class), config)
    taken = inspect.signature(model_class.forward).parameters
    main = _main_input(model_class, taken)
    return {n: make(sizes) for n, make in INPUTS.items() if n in taken and n != main}


def predicts_classes(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model classifies samples."""
    return _task(model_class) is Task.SAMPLES


def sound_mask(model_class: type[PreTrainedModel], columns: Columns) -> Columns:
    """Make the mask of a whole recording, for models that require one."""
    taken = inspect.signature(model_class.forward).parameters
    sound = columns.get("input_features")
    if sound is None or "attention_mask" not in taken:
        return {}
    return {"attention_mask": Column(sound.shape[:2], 1, first=1)}


def predicts_pairs(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model matches texts with images."""
    names = auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    return any(model_class.__name__ in _names(value) for value in names)


def predicts_text_of_images(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model predicts a text with images in between."""
    names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return any(model_class.__name__ in _names(value) for value in names)


def example_arguments(model_class: type[PreTrainedModel]) -> dict[str, bool]:
    """Return the arguments beside a batch with which a model returns a loss."""
    taken = inspect.signature(model_class.forward).parameters
    return {"return_loss": True} if "return_loss" in taken else {}


def _task(model_class: type[PreTrainedModel]) -> Task:
    for task, mappings in TASKS.items():
        for mapping in mappings:
            if any(model_class.__name__ in _names(value) for value in mapping.values()):
                return task
    return Task.TOKENS


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _sequence(config: PreTrainedConfig, wanted: int | None) -> int:
    limit = most_positions(config)
    if wanted is None:
        return DEFAULT_SEQUENCE if limit is None else min(DEFAULT_SEQUENCE, limit[1])
    if wanted < 1:
        raise CommandError(f"--seq {wanted} has no tokens; use 1 or more.")
    if limit is not None and wanted > limit[1]:
        name, longest = limit
        raise CommandError(
            f"--seq {wanted} is more than the model's {longest} positions; use --seq {longest}, or "
            f"--config '{{\"{name}\": {wanted}}}'."
        )
    return wanted


def _shifts_labels(config: PreTrainedConfig) -> bool:
    """Whether the decoder's inputs are made from the labels, with a start token."""
    return getattr(config, "decoder_start_token_id", None) is not None


def visual_field(config: PreTrainedConfig, default: int, *fields: str) -> Any:
    """Return the first of some fields that the config has, or its part for images."""
    owners = (config, getattr(config, "vision_config", None))
    found = (getattr(owner, name, None) for name in fields for owner in owners)
    return next((value for value in found if value is not None), default)


def _token_ids(sizes: _Sizes) -> Column:
    if sizes.task is Task.CHOICES:
        return Column((sizes.batch, DEFAULT_CHOICES, sizes.sequence), sizes.vocabulary)
    return Column((sizes.batch, sizes.sequence), sizes.vocabulary, last=_end_of_text(sizes))


def _end_of_text(sizes: _Sizes) -> int | None:
    """Return the token that ends a text: some models classify a whole text at its position."""
    end = getattr(text_part(sizes.config), "eos_token_id", None)
    fits = isinstance(end, int) and 0 <= end < sizes.vocabulary
    return end if fits and sizes.task is Task.SAMPLES else None


def _pixels(sizes: _Sizes) -> Column:
    channels = visual_field(sizes.config, 3, *IMAGE_CHANNELS)
    return Column((sizes.batch, int(channels), *sizes.image))


def _sound(sizes: _Sizes) -> Column:
    """Make a recording: a waveform where the model computes frames, else a spectrum by frame."""
    strides = getattr(sizes.config, "conv_stride", None)
    if strides:
        return Column((sizes.batch, sizes.sequence * math.prod(strides)))
    if _bins(sizes) is None:
        return Column((sizes.batch, DEFAULT_WAVE))
    return _spectrum(sizes)


def _bins(sizes: _Sizes) -> int | None:
    """Return the number of values of a frame of sound."""
    owners = _sound_configs(sizes)
    return _first(owners, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")


def _sound_configs(sizes: _Sizes) -> tuple[object, ...]:
    inner = (getattr(sizes.config, name, None) for name in ("audio_config", "encoder_config"))
    return (sizes.config, *inner)


def _spectrum(sizes: _Sizes) -> Column:
    owners, bins = _sound_configs(sizes), _bins(sizes)
    if bins is None:
        raise CommandError(
            f"{type(sizes.config).__name__} does not say how many numbers a frame of sound has, so "
            "there is no example batch."
        )
    if (positions := _first(owners, "max_source_positions")) and _first(owners, "num_mel_bins"):
        return Column((sizes.batch, bins, 2 * positions))  # a convolution halves its frames
    if per_token := _first(owners, "audio_length_per_tok"):  # as many of each, sound under text
        return Column((sizes.batch, bins, per_token * sizes.sequence))
    frames = _first(owners, "max_length") if _first(owners, "time_stride") else None
    if sizes.task is Task.SPEECH and any("subsampl" in n for o in owners if o for n in vars(o)):
        frames = SUBSAMPLING * sizes.sequence
    return Column((sizes.batch, frames or sizes.sequence, bins))


def _first(owners: Sequence[object], *names: str) -> int | None:
    """Return the first of some fields that some config has."""
    found = (getattr(owner, name, None) for name in names for owner in owners)
    return next((value for value in found if isinstance(value, int)), None)


def _labels(sizes: _Sizes) -> Column:
    batch, num_labels = sizes.batch, int(sizes.config.num_labels or 1)
    if sizes.task is Task.TOKENS:
        return Column((batch, sizes.sequence), sizes.vocabulary)
    if sizes.task is Task.TAGS:
        return Column((batch, sizes.sequence), num_labels)
    if sizes.task is Task.PIXELS:
        return Column((batch, *sizes.image), num_labels)
    if sizes.task is Task.CHOICES:
        return Column((batch,), DEFAULT_CHOICES)
    if sizes.task is Task.SPEECH:
        return Column((batch, max(1, sizes.sequence // 4)), sizes.vocabulary)
    if sizes.task is Task.ORDER:
        return Column((batch,), 2)
    # transformers takes a single label for a number to regress.
    return Column((batch,), num_labels if num_labels > 1 else None)


def _position(sizes: _Sizes) -> Column:
    return Column((sizes.batch,), sizes.sequence)


def _boolean(sizes: _Sizes) -> Column:
    return Column((sizes.batch,), 2)


def _boxes(sizes: _Sizes) -> Column:
    # Equal corners are never out of order, whatever is drawn; layouts are numbered to 1000.
    return Column((sizes.batch, sizes.sequence, 4), 1)


INPUTS: Mapping[str, Callable[[_Sizes], Column]] = MappingProxyType(
    {
        "input_ids": _token_ids,
        "pixel_values": _pixels,
        "input_values": _sound,
        "input_features": _spectrum,
    }
)
"""How the main input is made, by its name."""

TARGETS: Mapping[str, Callable[[_Sizes], Column]] = MappingProxyType(
    {
        "bbox": _boxes,
        "labels": _labels,
        "start_positions": _position,
        "end_positions": _position,
        "next_sentence_label": _boolean,
        "sentence_order_label": _boolean,
    }
)
"""How the other columns are made, for models whose forward takes them."""

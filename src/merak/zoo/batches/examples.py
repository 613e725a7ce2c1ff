"""Further example batches, for models that do not train on the plain one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from transformers import PreTrainedConfig, PreTrainedModel

from merak.check.reference import is_without_loss
from merak.core.errors import CommandError
from merak.graph.trace.calls.call import LossFunction
from merak.zoo.batches.batch import (
    TARGETS,
    documented_columns,
    example_columns,
    further_inputs,
    predicts_classes,
    predicts_pairs,
    requested_columns,
    sound_mask,
    visual_field,
)
from merak.zoo.batches.columns import Column, Columns
from merak.zoo.batches.documented import (
    described,
    is_target,
    loss_givers,
    names_in_error,
    with_companions,
)
from merak.zoo.batches.images_in_text import image_tokens, with_image_tokens, with_images
from merak.zoo.batches.losses import class_loss, outputs_loss, pair_loss
from merak.zoo.batches.resize import fitted
from merak.zoo.configs.field_names import IMAGE_CHANNELS
from merak.zoo.configs.fields import text_part

PATCHES = 4
"""Patches along an image's side, for models that take images in patches."""

STACKED = (1, 2, 4)
"""How many frames of sound, or changes between them, may be side by side in one."""

FRAMES = 4
"""Images of a film, where the config does not say."""

SEPARATORS = 3
"""Behind the question twice, and behind the context."""

SOUND = ("input_values", "input_features")
"""Inputs that are not for images."""

MAX_REQUESTED = 8
"""So many things a model may turn out to need, one after the other."""


@dataclass(frozen=True, slots=True)
class Example:
    """Batch, and the source of its loss.

    Args:
        columns: what the batch holds.
        loss_fn: as of `Case`.
        loss_columns: as of `Case`.
    """

    columns: Columns
    loss_fn: LossFunction | None = None
    loss_columns: tuple[str, ...] = ()


def examples(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sequence: int,
    failures: Sequence[BaseException] = (),
) -> Iterator[Example]:
    """Yield batches of one sample that a model may train on, the plainest first.

    Args:
        model_class: the architecture.
        config: its config.
        sequence: tokens of a sequence.
        failures: what the batches before failed with, one each; it grows while the caller tries
            them, and what the last one says is given next.

    Raises:
        CommandError: there is no batch for such a model.
    """
    seen: list[Example] = []
    for example in chain(_all(model_class, config, sequence), _fitted(seen, failures)):
        if example in seen:
            continue
        seen.append(example)
        yield example
        for requested in _with_requested_columns(
            model_class, config, sequence, (example, failures)
        ):
            if requested not in seen:
                seen.append(requested)
                yield requested


def image_examples(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sequence: int,
    failures: Sequence[BaseException] = (),
) -> Iterator[Example]:
    """Yield batches of one sample, a text with an image in it, that a model may train on.

    Arguments as of `examples`.

    Raises:
        CommandError: it takes images in another form.
    """
    plain = example_columns(model_class, config, sequence=sequence)
    inputs = further_inputs(model_class, config, sequence)
    text = plain | {n: c for n, c in inputs.items() if n not in SOUND}
    taken = inspect.signature(model_class.forward).parameters
    forms = list(with_images(config, text, taken))
    if not forms:
        raise CommandError(
            f"{model_class.__name__} takes images in a form for which there is no example batch."
        )
    for columns in forms:
        example = Example(columns)
        yield example
        for _ in range(MAX_REQUESTED):
            if not failures:
                break
            times = image_tokens(_origin(failures[-1]), example.columns, config)
            if times is None:
                break
            example = Example(with_image_tokens(columns, times))
            yield example


def _all(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, sequence: int
) -> Iterator[Example]:
    plain = example_columns(model_class, config, sequence=sequence)
    if "spatial_shapes" in inspect.signature(model_class.forward).parameters:
        plain |= _in_patches(config)
    if not any(map(is_target, plain)):
        givers = [name for name in loss_givers(model_class) if name not in plain]
        plain |= requested_columns(model_class, config, sequence, givers)
    yield Example(plain)
    everything = plain | further_inputs(model_class, config, sequence)
    yield Example(everything)
    masked = plain | sound_mask(model_class, plain)
    for times in STACKED if masked != plain else ():
        sound = masked["input_features"]
        wide = replace(sound, shape=(*sound.shape[:-1], times * sound.shape[-1]))
        yield Example(masked | {"input_features": wide})
    documented = [_documented(model_class, config, c, sequence) for c in (plain, everything)]
    yield from map(Example, documented)
    positions = getattr(text_part(config), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > sequence:  # one output for each position there is
        yield Example(example_columns(model_class, config, sequence=positions))
    separated = _separated(plain, config)
    if separated is not None:
        yield Example(separated)
    if predicts_pairs(model_class):
        yield Example(everything, pair_loss)
    if predicts_classes(model_class):
        num_labels = int(config.num_labels or 1)
        labels = {"labels": Column((1,), num_labels)}
        yield Example(plain | labels, class_loss, ("labels",))
    for columns in (plain, everything, *documented):
        inputs = {n: c for n, c in columns.items() if n not in TARGETS and not is_target(n)}
        yield Example(inputs, outputs_loss)


def _with_requested_columns(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sequence: int,
    tried: tuple[Example, Sequence[BaseException]],
) -> Iterator[Example]:
    """Yield an example with the columns that the model's errors request, one after the other."""
    example, failures = tried
    documented = described(model_class)
    for _ in range(MAX_REQUESTED):
        if not failures:
            return
        error = _origin(failures[-1])
        others = [name for name in documented if name not in example.columns]
        is_lossless = is_without_loss(error)
        targets = [name for name in others if is_target(name)]
        wanted = with_companions(targets, others) if is_lossless else names_in_error(error, others)
        columns = requested_columns(model_class, config, sequence, wanted)
        if is_lossless and not columns and example.loss_fn is None:
            example = replace(example, loss_fn=outputs_loss)
        elif columns := columns or _as_video(error, example.columns, config):
            example = replace(example, columns=example.columns | columns)
        else:
            return
        yield example


def _fitted(tried: Sequence[Example], failures: Sequence[BaseException]) -> Iterator[Example]:
    """Yield examples that failed in the sizes that the model then requests."""
    for example in tuple(tried):
        for _ in range(MAX_REQUESTED):
            place = tried.index(example)
            if place >= len(failures):
                return
            columns = fitted(_origin(failures[place]), example.columns)
            if not columns:
                break
            example = replace(example, columns=example.columns | columns)
            yield example


def _as_video(error: BaseException, columns: Columns, config: PreTrainedConfig) -> Columns:
    """Stack images to a video, for a model that finds a dimension missing."""
    image = columns.get("pixel_values")
    if image is None or len(image.shape) != 4 or "expected 5, got 4" not in str(error):
        return {}
    frames = int(visual_field(config, FRAMES, "num_frames"))
    return {"pixel_values": replace(image, shape=(1, frames, *image.shape[1:]))}


def _origin(error: BaseException) -> BaseException:
    """Return the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _separated(columns: Columns, config: PreTrainedConfig) -> Columns | None:
    """Make a question and its context with the separators that some tokenizers put around them."""
    separator = getattr(config, "sep_token_id", None)
    ids = columns.get("input_ids")
    if ids is None or not isinstance(separator, int):
        return None
    if not 0 <= separator < int(ids.num_values or 0) or ids.shape[-1] < SEPARATORS:
        return None
    return {**columns, "input_ids": replace(ids, last=separator, times=SEPARATORS)}


def _in_patches(config: PreTrainedConfig) -> Columns:
    """Make an image as a sequence of patches, with its height and width in patches."""
    size = visual_field(config, 16, "patch_size")
    channels = visual_field(config, 3, *IMAGE_CHANNELS)
    return {
        "pixel_values": Column((1, PATCHES**2, channels * size**2)),
        "pixel_attention_mask": Column((1, PATCHES**2), 1, first=1),
        "spatial_shapes": Column((1, 2), 1, first=PATCHES),
    }


def _documented(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, columns: Columns, sequence: int
) -> Columns:
    """Make the columns in the shapes that the documentation of the model's forward gives them."""
    found = dict(columns)
    for name, column in documented_columns(model_class, config, sequence, columns).items():
        if len(column.shape) > len(columns[name].shape):
            found[name] = replace(columns[name], shape=column.shape)
    return found

"""Images of a recipe: decoded, cropped, mirrored and normalised as a model takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig, ViTImageProcessorPil

from merak.cli.recipe.data.records import Source
from merak.cli.recipe.schema import DataRecipe
from merak.core.errors import CommandError
from merak.core.files.json_file import read_json

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, where the model's folder says no others."""

LABEL_COLUMNS = ("label", "labels", "fine_label")
"""Names of the column of classes, the first that is there."""

PREPROCESSOR = "preprocessor_config.json"
CROP_MARGIN = 0.875
"""Width of the centre crop ÷ width of the image, in evaluation."""

AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Random crops: their share of the image's area, and width ÷ height."""

_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class ImageColumns:
    """Columns of labelled images.

    Args:
        image: of the images.
        label: of the classes.
        classes: names of the classes.
    """

    image: str
    label: str
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PixelValues:
    """Transform of rows with images into what a model takes; drawn from torch's global state.

    Args:
        columns: of the rows.
        size: height and width of the result.
        mean: of the channels, in 0 … 1.
        std: of the channels.
        augment: whether crops and mirrorings are random.
    """

    columns: ImageColumns
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Make `pixel_values`, (channels, height, width) each, and `labels` of some rows."""
        return {
            "pixel_values": [self.pixels(image) for image in rows[self.columns.image]],
            "labels": [int(label) for label in rows[self.columns.label]],
        }

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """Crop, resize and normalise an image."""
        image = image.convert("RGB" if len(self.mean) == 3 else "L")
        box = _random_box(image) if self.augment else _centre_box(image, self.size)
        height, width = self.size
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        if self.augment and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = np.asarray(image, np.float32).reshape(height, width, -1) / 255
        values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


Box = tuple[float, float, float, float]


def _centre_box(image: Image.Image, size: tuple[int, int]) -> Box:
    scale = CROP_MARGIN * min(image.width / size[1], image.height / size[0])
    width, height = size[1] * scale, size[0] * scale
    left, top = (image.width - width) / 2, (image.height - height) / 2
    return left, top, left + width, top + height


def _random_box(image: Image.Image) -> Box:
    for _ in range(_ATTEMPTS):
        area = image.width * image.height * _between(*AREAS)
        ratio = math.exp(_between(math.log(RATIOS[0]), math.log(RATIOS[1])))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if width <= image.width and height <= image.height:
            left, top = _between(0, image.width - width), _between(0, image.height - height)
            return left, top, left + width, top + height
    return _centre_box(image, (1, 1))


def _between(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def image_columns(source: Source, recipe: DataRecipe) -> ImageColumns:
    """Find the columns of images and classes.

    Args:
        source: of the recipe.
        recipe: its data.

    Raises:
        CommandError: there are none; the message names the columns that are there.
    """
    rows = source.train.dataset
    features = getattr(rows, "features", None)
    if features is None:
        raise CommandError(
            f"data.source={recipe.source!r} is no dataset of images; give a folder with one folder "
            "of images for each class, or a dataset with a column of images."
        )
    image = recipe.image_column or next(
        (name for name, kind in features.items() if isinstance(kind, datasets.Image)), None
    )
    label = recipe.label_column or next((n for n in LABEL_COLUMNS if n in features), None)
    for key, wanted, what in (("image", image, "images"), ("label", label, "classes")):
        if wanted is None or wanted not in features:
            raise CommandError(
                f"data.source={recipe.source!r} has no column of {what}"
                f"{'' if wanted is None else f' {wanted!r}'}, only {', '.join(features)}; set "
                f"data.{key}_column{_folders(source) if key == 'label' else '.'}"
            )
    assert image is not None and label is not None
    return ImageColumns(image, label, _classes(features[label], rows, label, recipe))


def _folders(source: Source) -> str:
    return ", or put the images of each class into a folder of its name." if source.images else "."


def _classes(kind: Any, rows: Any, label: str, recipe: DataRecipe) -> tuple[str, ...]:
    if isinstance(kind, datasets.ClassLabel):
        return tuple(map(str, kind.names))
    is_whole = isinstance(kind, datasets.Value) and "int" in kind.dtype
    if not is_whole or isinstance(rows, datasets.IterableDataset):
        raise CommandError(
            f"the column {label!r} of {recipe.source} holds {kind}, not numbers of classes with "
            "their names; cast it by `datasets`' class_encode_column and save that."
        )
    return tuple(str(number) for number in range(max(rows[label]) + 1))


def pixel_values(
    columns: ImageColumns, config: PreTrainedConfig, folder: Path | None, augment: bool
) -> PixelValues:
    """Make the transform of images for a model.

    Args:
        columns: of the rows.
        config: of the model, with the size of its images.
        folder: of the model, whose file of a preprocessor says how channels are normalised.
        augment: as of `PixelValues`.

    Raises:
        CommandError: the config names no size of images.
    """
    size = getattr(config, "image_size", None)
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    if isinstance(size, int):
        size = [size, size]
    if not (isinstance(size, (list, tuple)) and len(size) == 2):
        raise CommandError(
            f"{type(config).__name__} has image_size={size!r}, from which no size of images can be "
            "told; set model.config.image_size."
        )
    channels = getattr(config, "num_channels", 3)
    mean, std = _normalisation(folder, channels)
    return PixelValues(columns, (int(size[0]), int(size[1])), mean, std, augment)


def _normalisation(
    folder: Path | None, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    file = None if folder is None else folder / PREPROCESSOR
    if file is not None and file.is_file():
        try:
            stored = read_json(file, finite=False)
            return tuple(stored["image_mean"]), tuple(stored["image_std"])
        except (ValueError, KeyError, TypeError):
            pass  # a preprocessor of another kind
    if channels == 1:
        return (sum(MEAN) / 3,), (sum(STD) / 3,)
    return MEAN, STD


def processor_of(transform: PixelValues) -> Any:
    """Return the image processor that is saved beside the model, with the same normalisation."""
    height, width = transform.size
    return ViTImageProcessorPil(
        size={"height": height, "width": width},
        image_mean=list(transform.mean),
        image_std=list(transform.std),
    )


def transformed(rows: Any, transform: PixelValues) -> Any:
    """Return a dataset whose rows are transformed as they are read."""
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(transform, batched=True, batch_size=16, remove_columns=rows.column_names)
    return rows.with_transform(transform)

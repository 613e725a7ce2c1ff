"""Conversations with images: their processor, their images, and batches of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
from torch.nn.functional import pad
from transformers import AutoProcessor, ProcessorMixin

from merak.cli.recipe.data.hub import load_hub_processor
from merak.cli.recipe.data.objective import IMAGE_COLUMNS
from merak.core.errors import CommandError
from merak.zoo.hub import first_words

_FILLED = {"labels": -100}
"""What padding is in a column, where it is not 0; the processor says that of token ids."""


@dataclass(frozen=True, slots=True)
class PaddedConversations:
    """Collator that pads all batches to one length, so that one traced graph serves them all.

    Args:
        collator: TRL's, which applies template and processor.
        length: tokens of a sample.
        pad_token_id: token that padding consists of.
    """

    collator: Any
    length: int
    pad_token_id: int

    @classmethod
    def of(cls, processor: Any, length: int, answers_only: bool) -> PaddedConversations:
        """Make the collator of a processor.

        Args:
            processor: of the model.
            length: tokens of a sample; what is longer is cut.
            answers_only: whether answers alone have labels.
        """
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        collator = DataCollatorForVisionLanguageModeling(
            processor, max_length=length, assistant_only_loss=answers_only
        )
        return cls(collator, length, processor.tokenizer.pad_token_id)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make the batch of some rows.

        Args:
            rows: with `messages`, and `images` or `image`.
        """
        batch = self.collator([dict(row) for row in rows])
        tokens = batch["input_ids"].shape
        filled = {"input_ids": self.pad_token_id, **_FILLED}
        return {
            name: pad(value, (0, self.length - tokens[1]), value=filled.get(name, 0))
            if value.shape == tokens
            else value
            for name, value in batch.items()
        }


def load_processor(name: str) -> ProcessorMixin:
    """Load the processor of a folder, or of the hub.

    Args:
        name: folder, or owner and name.

    Raises:
        CommandError: there is none for images and text.
    """
    folder = Path(name).expanduser()
    try:
        found = (
            AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            if folder.is_dir()
            else load_hub_processor(name)
        )
    except Exception as cause:  # whatever a folder's files may lead to
        raise CommandError(
            f"{name} has no processor that transformers can load: {first_words(cause)}."
        ) from cause
    if not isinstance(found, ProcessorMixin):
        raise CommandError(
            f"{name} has no processor of images and text, but {type(found).__name__} alone; name "
            "the folder of one as data.tokenizer."
        )
    return found


def marks_answers(processor: Any) -> bool:
    """Whether a processor's chat template says which tokens are answers.

    Args:
        processor: with its template.
    """
    return "generation" in str(processor.chat_template or "").replace("add_generation_prompt", "")


def with_images(rows: Any, files: Sequence[Path]) -> Any:
    """Rows whose images are decoded when they are read; names of files become images.

    Args:
        rows: a dataset.
        files: that the rows are from, beside which images are; empty for a dataset of its own.
    """
    name = next(name for name in IMAGE_COLUMNS if name in rows.column_names)
    example = next((row[name] for row in rows if row[name]), None)
    several = isinstance(example, list)
    first = example[0] if several and example else example
    if not isinstance(first, str):
        return rows
    beside = files[0].parent if files else Path()

    def stored(name: str) -> dict[str, Any]:
        return {"bytes": None, "path": str(beside / name)}

    named = [[stored(one) for one in found] if several else stored(found) for found in rows[name]]
    kind = datasets.List(datasets.Image()) if several else datasets.Image()
    return rows.remove_columns(name).add_column(name, named, feature=kind)

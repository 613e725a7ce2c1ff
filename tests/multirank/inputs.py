"""Small models, each called in one of the ways in which users call theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from merak.check import Case

Batch = dict[str, torch.Tensor]

VOCABULARY, SEQUENCE = 64, 8
WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
IMAGE = {**WIDTHS, "image_size": 16, "patch_size": 8}
SHOWN = {"output_hidden_states": True, "output_attentions": True}


@dataclass(frozen=True, slots=True)
class Way:
    """A way of calling a model.

    Args:
        model: its class.
        config: fields of its config.
        columns: makes the columns beside the ids of the texts, of those ids.
        fixed: arguments that are no tensors.
    """

    model: str
    config: Mapping[str, Any]
    columns: Callable[[torch.Tensor], Batch]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def case(self, name: str) -> Case:
        """As something to check."""
        return Case(name, partial(_build, self), partial(_batch, self), fixed=self.fixed)


def _build(way: Way) -> nn.Module:
    model_class = getattr(transformers, way.model)
    model: nn.Module = model_class(model_class.config_class(**way.config))
    return model


def _batch(way: Way, step: int, samples: int) -> Batch:
    torch.manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (samples, SEQUENCE))
    return {"input_ids": ids, **way.columns(ids)}


def next_words(ids: torch.Tensor) -> Batch:
    return {"labels": ids}


def a_class(ids: torch.Tensor) -> Batch:
    return {"labels": ids[:, 0] % 2}


def a_number(ids: torch.Tensor) -> Batch:
    return {"labels": ids[:, 0] / VOCABULARY}


def several_classes(ids: torch.Tensor) -> Batch:
    return {"labels": (ids[:, :3] % 2).float()}


def tags(ids: torch.Tensor) -> Batch:
    return {"labels": ids % 2}


def answers(ids: torch.Tensor) -> Batch:
    return {"start_positions": ids[:, 0] % SEQUENCE, "end_positions": ids[:, 1] % SEQUENCE}


def padding(ids: torch.Tensor, side: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """1 where there is a word; the samples have different lengths."""
    lengths = SEQUENCE - torch.arange(len(ids)) % 4
    mask = torch.arange(SEQUENCE) < lengths[:, None]
    return (mask.flip(1) if side == "left" else mask).to(dtype)


def padded(
    ids: torch.Tensor, target: Callable[[torch.Tensor], Batch], side: str, dtype: torch.dtype
) -> Batch:
    mask = padding(ids, side, dtype)
    found = target(ids)
    if "labels" in found and found["labels"].shape == ids.shape:
        found["labels"] = found["labels"].masked_fill(mask == 0, -100)
    return {"attention_mask": mask, **found}


def counted(ids: torch.Tensor, target: Callable[[torch.Tensor], Batch]) -> Batch:
    """Padded on the left, with positions that begin behind the padding."""
    found = padded(ids, target, "left", torch.int64)
    positions = (found["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return {"position_ids": positions, **found}


def in_turns(ids: torch.Tensor, target: Callable[[torch.Tensor], Batch]) -> Batch:
    """Two sentences, and positions that begin again with the second."""
    second = torch.arange(SEQUENCE) >= SEQUENCE // 2
    places = torch.arange(SEQUENCE) % (SEQUENCE // 2)
    return {
        "token_type_ids": second.long().expand_as(ids).contiguous(),
        "position_ids": places.expand_as(ids).contiguous(),
        **target(ids),
    }


def packed(ids: torch.Tensor, target: Callable[[torch.Tensor], Batch]) -> Batch:
    """Two texts in a row, told apart by positions alone."""
    places = torch.arange(SEQUENCE) % (SEQUENCE // 2)
    return {"position_ids": places.expand_as(ids).contiguous(), **target(ids)}


def by_pair(
    ids: torch.Tensor, target: Callable[[torch.Tensor], Batch], dtype: torch.dtype
) -> Batch:
    """A mask of four dims: which word may look at which, those before it in the same sample."""
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    seen = causal & padding(ids, "right", torch.bool)[:, None, None, :]
    if dtype is torch.bool:
        return {"attention_mask": seen, **target(ids)}
    least = torch.finfo(dtype).min
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)
    return {"attention_mask": added, **target(ids)}


def images(ids: torch.Tensor) -> Batch:
    return {"pixel_values": torch.randn(len(ids), 3, 16, 16)}

"""Requests for models by name, and what their configs leave open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from merak.core.errors import MerakError
from merak.zoo.configs.fields import Fields, merged, text_part
from merak.zoo.configs.fill_defaults import completions, missing_field
from merak.zoo.configs.shrink import Wanted, attempts
from merak.zoo.model_source import ModelSource, resolve_model

MAX_MISSING_FIELDS = 8
"""Fields that are taken from other parts of a config, one after the other."""


@dataclass(frozen=True, slots=True)
class Request:
    """Model by name, as the user requests it.

    Args:
        model: as `--model`.
        given: fields of its config that the user has set.
        sequence: tokens of a sequence; None takes a short one.
        trust_remote_code: whether code in the model's folder may run.
        real_widths: whether the model keeps its widths, experts and vocabulary, of a few layers.
        config: fields that a recipe changes in the model's config, and the check may make smaller.
    """

    model: str
    given: Mapping[str, Any] = field(default_factory=dict)
    sequence: int | None = None
    trust_remote_code: bool = False
    real_widths: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def source(self, changes: Mapping[str, Any]) -> ModelSource:
        """Resolve the model's class and config, with changes of fields the user has not set."""
        fields = merged(merged(self.config, changes), self.given)
        # What a model lacks in its config, and was found for it, its config does not know.
        source = resolve_model(
            self.model,
            fields,
            trust_remote_code=self.trust_remote_code,
            missing_field=changes.keys() - self.given.keys(),
        )
        _pad(source.config)
        return source


def completions_of(request: Request, wanted: Wanted) -> Iterator[Fields]:
    """Yield completions of a model's config; those that its class refuses are left out.

    Args:
        request: the model.
        wanted: what its small version has, on which missing fields are found.
    """
    seen: list[Fields] = [{}]
    for completion in completions(request.source({}).config):
        try:
            found = _with_missing_fields(request, completion, wanted)
        except MerakError:
            continue
        if found not in seen:
            seen.append(found)
            yield found


def _with_missing_fields(request: Request, completion: Fields, wanted: Wanted) -> Fields:
    """Add the fields to a completion that the model built with it finds missing."""
    for _ in range(MAX_MISSING_FIELDS):
        config = request.source(completion).config
        smallest = next(attempts(config, request.given, wanted)).fields
        source = request.source(merged(completion, smallest))
        try:
            with torch.device("meta"):
                source.build()
        except MerakError as error:
            found = missing_field(error, source.config)
            if not found:
                break
            completion = merged(completion, found)
        else:
            break
    return completion


def padding(request: Request) -> Fields:
    """Return the padding token that a requested model is given, where its config names none."""
    source = resolve_model(
        request.model, request.given, trust_remote_code=request.trust_remote_code
    )
    return _pad(source.config)


def _pad(config: PreTrainedConfig) -> Fields:
    """Name a padding token where there is none, which decoders that classify texts look for.

    Returns:
        What was set.
    """
    text = text_part(config)
    if not getattr(text, "vocab_size", None) or getattr(text, "pad_token_id", None) is not None:
        return {}
    text.pad_token_id = 0
    return {"pad_token_id": 0}

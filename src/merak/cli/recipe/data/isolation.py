"""Test of whether a model keeps attention inside the documents of a packed sample."""

from __future__ import annotations

import inspect
from itertools import islice

import torch

from merak.cli.recipe.schema import ModelRecipe
from merak.zoo.configs.fields import merged
from merak.zoo.configs.shrink import attempts
from merak.zoo.model_source import ModelSource, resolve_model

_MOST_ATTEMPTS = 6
_LENGTHS = 5, 6
"""Tokens of the two documents that are tried."""

_ROUNDING = 1e-3
"""Of what reaches a token by attention, where documents are not kept apart."""

_SCALE = 10.0
"""Factor of fresh weights, whose attention would have little effect."""


def keeps_documents_apart(source: ModelSource, recipe: ModelRecipe) -> bool:
    """Run a small version of a model on two documents, then change the first of them.

    Args:
        source: the model.
        recipe: as which it was resolved.

    Returns:
        Whether all that it computes for the second document stays the same, where its positions
        begin anew; False also for a model that takes no positions, or of which no small version
        runs.
    """
    if "position_ids" not in inspect.signature(source.model_class.forward).parameters:
        return False
    with torch.random.fork_rng():
        small_ones = (attempt for attempt in attempts(source.config, {}) if attempt.is_small)
        for attempt in islice(small_ones, _MOST_ATTEMPTS):
            try:
                small = resolve_model(
                    recipe.name,
                    merged(recipe.config, attempt.fields),
                    trust_remote_code=recipe.trust_remote_code,
                )
                return _stays_the_same(small)
            except Exception:  # whatever a model's code says about sizes that do not fit
                continue
    return False


def _stays_the_same(small: ModelSource) -> bool:
    model = small.build().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= _SCALE
    ids = torch.arange(sum(_LENGTHS))[None] % small.config.get_text_config().vocab_size
    begin_anew = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    change = _change_of_second(model, ids, begin_anew)
    return change < _ROUNDING * _change_of_second(model, ids, torch.arange(sum(_LENGTHS))[None])


def _change_of_second(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> float:
    """The largest change of the second document's logits when the first document changes."""
    other = ids.clone()
    other[0, : _LENGTHS[0]] = ids[0, : _LENGTHS[0]].flip(0) + 1
    before, after = (_logits(model, own, positions)[0, _LENGTHS[0] :] for own in (ids, other))
    return float((before - after).abs().max())


def _logits(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return found

"""The architectures of the zoo: every one in some of transformers' own lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers.models.auto import modeling_auto as auto

LISTS: Mapping[str, Mapping[str, str | Sequence[str]]] = {
    "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked LM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
"""transformers' lists by what the models are for."""


def architectures() -> dict[str, str]:
    """Class names, each with the first list it is in; of several classes of a model the first."""
    found: dict[str, str] = {}
    for task, mapping in LISTS.items():
        for names in mapping.values():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, task)
    return found

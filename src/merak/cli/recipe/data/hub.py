"""Datasets and tokenizers of the Hugging Face hub, or of its cache where there is no network."""

from __future__ import annotations

from typing import Any

import datasets  # type: ignore[import-untyped]
from transformers import AutoProcessor, AutoTokenizer

from merak.zoo.hub import offline_if_unreachable


def load_hub_dataset(name: str, subset: str | None, streaming: bool) -> Any:
    """Load all splits of a dataset of the hub.

    Args:
        name: owner and name.
        subset: its configuration; None for the only one.
        streaming: whether rows are fetched as they are read.

    Raises:
        Exception: whatever `datasets` says about a dataset that it cannot load.
    """
    with offline_if_unreachable(datasets.config):
        return datasets.load_dataset(name, subset, streaming=streaming)


def load_hub_tokenizer(name: str) -> Any:
    """Load a tokenizer of the hub; code in its repository is not run.

    Raises:
        Exception: whatever transformers says about one that it cannot load.
    """
    with offline_if_unreachable():
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def load_hub_processor(name: str) -> Any:
    """Load a processor of the hub; code in its repository is not run.

    Raises:
        Exception: whatever transformers says about one that it cannot load.
    """
    with offline_if_unreachable():
        return AutoProcessor.from_pretrained(name, trust_remote_code=False)

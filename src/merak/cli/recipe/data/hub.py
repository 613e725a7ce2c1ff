"""Datasets and tokenizers of the Hugging Face hub, or of its cache where there is no network."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import datasets  # type: ignore[import-untyped]
import huggingface_hub
from transformers import AutoTokenizer

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SECONDS_TO_ANSWER = 10


def is_hub_name(name: str) -> bool:
    """Whether a name can be one of the hub: an owner, a slash, and a name."""
    return _NAME.fullmatch(name) is not None


def load_hub_dataset(name: str, subset: str | None, streaming: bool) -> Any:
    """Load all splits of a dataset of the hub.

    Args:
        name: owner and name.
        subset: its configuration; None for the only one.
        streaming: whether rows are fetched as they are read.

    Raises:
        Exception: whatever `datasets` says about a dataset that it cannot load.
    """
    with _offline_if_unreachable():
        return datasets.load_dataset(name, subset, streaming=streaming)


def load_hub_tokenizer(name: str) -> Any:
    """Load a tokenizer of the hub; code in its repository is not run.

    Raises:
        Exception: whatever transformers says about one that it cannot load.
    """
    with _offline_if_unreachable():
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Read the cache alone where the hub does not answer, instead of half a minute of retries."""
    with ExitStack() as stack:
        if not _answers():
            for module in (huggingface_hub.constants, datasets.config):
                stack.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True))
        yield


@functools.cache
def _answers() -> bool:
    try:
        huggingface_hub.get_session().head(
            huggingface_hub.constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER
        )
    except Exception:  # of whichever HTTP client it has; also where it is told to be offline
        return False
    return True


def first_words(error: Exception) -> str:
    """Return the first sentence of an error's message, without its final stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[^.])\.\s|;\s", text)[0][:200].rstrip(". ")

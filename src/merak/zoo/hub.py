"""Models of the Hugging Face hub, or of its cache where there is no network."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError

from merak.core.errors import CommandError

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FORMER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
"""Of the hub's first models, such as gpt2 and bert-base-uncased, which have no owner."""

_SECONDS_TO_ANSWER = 10

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
"""What a model's folder is made of: config, weights, tokenizer, and its own code."""


def is_hub_name(name: str) -> bool:
    """Whether a name can be one of the hub: an owner, a slash, and a name."""
    return _NAME.fullmatch(name) is not None


def find_hub_file(model: str, file: str) -> Path | None:
    """Fetch one file of a model of the hub; None where the hub, or its cache, has no such model.

    Args:
        model: owner and name, or a name alone, as of the hub's first models.
        file: such as config.json.

    Raises:
        CommandError: the model has no such file, is not open to the user, or the hub says that
            something else is wrong.
    """
    if not is_hub_name(model) and not _FORMER_NAME.fullmatch(model):
        return None
    try:
        with offline_if_unreachable():
            return Path(huggingface_hub.hf_hub_download(model, file))
    except huggingface_hub.errors.LocalEntryNotFoundError:
        return None
    except (huggingface_hub.errors.GatedRepoError, EntryNotFoundError) as cause:
        raise _unfetched(f"{file} of {model}", cause) from cause
    except huggingface_hub.errors.RepositoryNotFoundError:
        return None
    except Exception as cause:  # of whichever HTTP client it has
        raise _unfetched(model, cause) from cause


def fetch_model(model: str) -> Path:
    """Fetch all of a model of the hub, weights included.

    Args:
        model: as of `find_hub_file`.

    Returns:
        The folder of its files, in the hub's cache.

    Raises:
        CommandError: it cannot be fetched.
    """
    try:
        with offline_if_unreachable():
            return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_FILES)))
    except Exception as cause:  # no network, no room, no right, …
        raise _unfetched(model, cause) from cause


def _unfetched(what: str, cause: Exception) -> CommandError:
    return CommandError(f"{what} cannot be fetched from the hub: {first_words(cause)}.")


@contextmanager
def offline_if_unreachable(*others: ModuleType) -> Iterator[None]:
    """Read the cache alone where the hub does not answer, instead of half a minute of retries.

    Args:
        *others: modules beside `huggingface_hub.constants` that say so to themselves.
    """
    with ExitStack() as stack:
        if not answers():
            for module in (huggingface_hub.constants, *others):
                stack.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True))
        yield


@functools.cache
def answers() -> bool:
    """Whether the hub answers, asked once."""
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

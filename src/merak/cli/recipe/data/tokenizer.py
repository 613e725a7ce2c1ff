"""Tokenizers of a recipe: of a folder or of the hub, or trained on the recipe's own text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from merak.cli.recipe.data.hub import load_hub_tokenizer
from merak.cli.recipe.schema import CHATML, TRAIN_TOKENIZER, DataRecipe
from merak.core.errors import CommandError
from merak.zoo.hub import first_words, is_hub_name

END, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
"""Special tokens of a tokenizer that is trained here."""

NUM_SENTINELS = 100
"""Tokens of a trained tokenizer that mark removed spans, for models with an encoder and decoder."""

TRAINING_BYTES = 200_000_000
"""Text that a tokenizer is trained on at most, from the beginning of the data."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "*.model")
"""Files by which the folder of a model has a tokenizer."""

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template that `chatml` names."""


def sentinel(index: int) -> str:
    """Return the token that marks a removed span, as T5's tokenizers call it."""
    return f"<extra_id_{index}>"


def tokenizer_name(recipe: DataRecipe, model: str) -> str:
    """Return a recipe's choice of a tokenizer: a folder, a name of the hub, or `train`.

    Args:
        recipe: its data.
        model: as `model.name`; the tokenizer in its folder counts where the recipe names none.
    """
    if recipe.tokenizer is not None:
        return recipe.tokenizer
    folder = Path(model).expanduser()
    has_one = folder.is_dir() and any(any(folder.glob(name)) for name in TOKENIZER_FILES)
    return model if has_one else TRAIN_TOKENIZER


def check_tokenizer(name: str) -> None:
    """Refuse a tokenizer that is not there.

    Args:
        name: as of `tokenizer_name`.

    Raises:
        CommandError: it is not.
    """
    if name == TRAIN_TOKENIZER or Path(name).expanduser().is_dir():
        return
    if not is_hub_name(name):
        raise CommandError(
            f"data.tokenizer={name!r} is not a folder; name the folder of a tokenizer, or one of "
            f"the hub (owner/name), or {TRAIN_TOKENIZER!r}."
        )
    load_tokenizer(name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or of the hub.

    Args:
        name: folder, or owner and name.

    Raises:
        CommandError: there is none that transformers can load.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            found: PreTrainedTokenizerBase = load_hub_tokenizer(name)
        except Exception as cause:  # no network, no such tokenizer, …
            raise CommandError(
                f"data.tokenizer={name!r} is not a folder, and cannot be loaded from the hub: "
                f"{first_words(cause)}."
            ) from cause
        return found
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as cause:  # whatever a folder's files may lead to
        raise CommandError(
            f"data.tokenizer={name!r} holds no tokenizer that transformers can load; "
            "name a folder that a tokenizer's save_pretrained wrote."
        ) from cause
    return found


def with_template(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, recipe: DataRecipe) -> None:
    """Set the chat template that a recipe names on its tokenizer or processor, if any.

    Raises:
        CommandError: the template is not there.
    """
    wanted = recipe.chat_template
    if wanted == CHATML:
        tokenizer.chat_template = CHATML_TEMPLATE
    elif wanted is not None:
        try:
            tokenizer.chat_template = Path(wanted).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            raise CommandError(
                f"data.chat_template={wanted!r} cannot be read: {first_words(cause)}; name a "
                f"Jinja file, or {CHATML!r}."
            ) from cause


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, sentinels: bool = False
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE.

    Args:
        texts: what it is trained on.
        vocabulary: entries that it has at most.
        sentinels: whether it has tokens for removed spans.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    extra = [sentinel(index) for index in range(NUM_SENTINELS if sentinels else 0)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD, MASK, *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(texts, TRAINING_BYTES), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=PAD, mask_token=MASK
    )


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    num_bytes = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode("utf-8", errors="replace"))
        if num_bytes >= limit:
            return

"""Small models under the names that transformers' tests give to those of the hub.

A folder laid out as the hub's own cache, so that `from_pretrained` finds them without a network.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase

Save = Callable[[Path], None]

TEXTS = (
    "a short sentence for a tokenizer of a small model",
    "This is a test sentence, and This is a much longer sentence that will require padding.",
    "the quick brown fox jumps over the lazy dog 0 1 2 3 4 5 6 7 8 9",
)
REVISION = "0" * 40


def fill_cache(home: Path) -> None:
    """Write every model that the tests name.

    Args:
        home: the folder that `HF_HOME` is to name.
    """
    transformers.utils.logging.disable_progress_bar()
    for name, save in MODELS.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / REVISION
        if snapshot.exists():
            continue
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(REVISION)
        torch.manual_seed(0)
        save(snapshot)


def _causal(make: Callable[[int], tuple[Any, Any]]) -> Save:
    def save(folder: Path) -> None:
        tokenizer = byte_tokenizer()
        config, model = make(len(tokenizer))
        model(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return save


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and a few merges, as those of GPT-2 and Llama 3 are."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<unk>"],  # whose numbers are those of the configs below
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        model_max_length=64,
    )


def word_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of word pieces, as BERT's."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    inner.post_processor = processors.BertProcessing(
        ("[SEP]", inner.token_to_id("[SEP]")), ("[CLS]", inner.token_to_id("[CLS]"))
    )
    return transformers.BertTokenizer(
        tokenizer_object=inner, vocab=inner.get_vocab(), model_max_length=128
    )


def _llama(size: int) -> tuple[Any, Any]:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=size, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    return config, transformers.LlamaForCausalLM


def _qwen2(size: int) -> tuple[Any, Any]:
    config = transformers.Qwen2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=size,
    )  # fmt: skip
    return config, transformers.Qwen2ForCausalLM


def _gpt2(size: int) -> tuple[Any, Any]:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=size, n_positions=1024,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return config, transformers.GPT2LMHeadModel


def _roberta(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    config = transformers.RobertaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(tokenizer), max_position_embeddings=130, is_decoder=True,
    )  # fmt: skip
    transformers.RobertaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bert(model: Any) -> Save:
    def save(folder: Path) -> None:
        tokenizer = word_tokenizer()
        config = transformers.BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=len(tokenizer), max_position_embeddings=512,
        )  # fmt: skip
        model(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return save


def _t5(folder: Path) -> None:
    words = sorted({word for text in TEXTS for word in text.split()})
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in words), *"abcdefghijklmno"]
    tokenizer = transformers.T5Tokenizer(
        vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0
    )
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=len(tokenizer),
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _wav2vec2(folder: Path) -> None:
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)


MODELS: dict[str, Save] = {
    "hf-internal-testing/tiny-random-LlamaForCausalLM": _causal(_llama),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": _causal(_qwen2),
    "openai-community/gpt2": _causal(_gpt2),
    "bert-base-cased": _bert(transformers.BertForSequenceClassification),
    "bert-base-uncased": _bert(transformers.BertForSequenceClassification),
    "google-bert/bert-base-uncased": _bert(transformers.BertForSequenceClassification),
    "google-bert/bert-base-cased-finetuned-mrpc": _bert(transformers.BertForSequenceClassification),
    "prajjwal1/bert-tiny": _bert(transformers.BertModel),
    "distilbert/distilroberta-base": _roberta,
    "google-t5/t5-small": _t5,
    "facebook/wav2vec2-base-960h": _wav2vec2,
}
"""What writes each model, by its name on the hub."""

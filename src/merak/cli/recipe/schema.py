"""Fields of a recipe, with the meaning of each; the page docs/recipes.md is made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merak.cli.recipe.source import Origins
from merak.core.precision import PARAMETER_TYPES, read_type

STANDARD_LIBRARY = "standard-library"
"""The data source that every machine has: the source files of Python's own library."""

TRAIN_TOKENIZER = "train"
"""The tokenizer that is trained on the recipe's own text."""

TEXT, CHAT, PAIRS, VISION, EMBEDDINGS, IMAGES, COLUMNS = FORMATS = (
    "text", "chat", "pairs", "vision", "embeddings", "images", "columns"
)  # fmt: skip
"""Formats of data."""

SEPARATE, JOINED, UNPACKED = "separate", "joined", "none"
PACKINGS = (SEPARATE, JOINED, UNPACKED)
"""Ways to make samples of one length from documents."""

CHATML = "chatml"
"""The name of a chat template for tokenizers without one."""


def own(default: Any, help: str, **checks: Any) -> Any:
    """Field of a section: its default, its meaning, and checks of its value.

    Args:
        default: its value where the recipe leaves it out; MISSING where it must not.
        help: a sentence.
        **checks: `least` and `most` of a number, or `choices`; `reads` a text as people write it;
            `formats` of data that it is for, where it is not for all of them.
    """
    metadata = {"help": help, **checks}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Section `model`: what is trained."""

    name: str = own(
        dataclasses.MISSING,
        "A model class of transformers, for random weights; or a folder that `save_pretrained` "
        "wrote, or a name of the hub, for its weights; or a config file, for random weights.",
    )
    config: dict[str, Any] = own(dict, "Fields of the model's config to change.")
    dtype: str | None = own(
        None,
        "Element type of the parameters, `float32`, `bfloat16` or `float16`; null for that of the "
        "folder's weights, and `float32` for random ones. In one of 16 bits, small updates are "
        "lost without `master_weights` in `arguments`.",
        choices=PARAMETER_TYPES,
        reads=read_type,
    )
    trust_remote_code: bool = own(False, "Whether code in the model's folder may run.")


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """Section `data`: what it is trained on."""

    source: str = own(
        STANDARD_LIBRARY,
        "A file or folder of text, JSON lines, Parquet or CSV; a folder of images; a dataset that "
        "`datasets` has saved; the name of a dataset on the Hugging Face hub, with a network; or "
        "`standard-library`, the source files of Python's own library.",
    )
    mix: list[dict[str, Any]] | None = own(
        None,
        "Several datasets of text or of conversations in place of `source`: a list of entries with "
        "`source`, and perhaps `subset`, `split`, `files`, `column` and `weight`: how often a "
        "record of it comes, beside the weights of the others; one that ends before these begins "
        "anew. Without weights, each record comes once.",
    )
    subset: str | None = own(None, "Configuration of a dataset of the hub.")
    split: str = own("train", "Split to train on, of a saved dataset or one of the hub.")
    eval_split: str | None = own(
        None,
        "Split to evaluate with; null for the first of `validation`, `eval` and `test` that is "
        "there.",
    )
    files: str | None = own(
        None,
        "Pattern of the files of a folder, such as `**/*.py`; null for all of the first kind that "
        "is there: `.txt`, `.jsonl`, `.json`, `.parquet`, `.csv`.",
    )
    format: str | None = own(
        None,
        "`text`, `chat` (conversations, or prompts with answers), `pairs` (`chosen` and `rejected` "
        "answers), `vision` (conversations with images), `embeddings` (texts that belong "
        "together), `images` (with a class each), or `columns` (those that the model takes); null "
        "to tell by the columns.",
        choices=FORMATS,
    )
    column: str = own("text", "Field or column that holds text.", formats=(TEXT,))
    image_column: str | None = own(
        None, "Column of images; null for the first one.", formats=(IMAGES,)
    )
    label_column: str | None = own(
        None,
        "Column of an image's class; null for `label`, `labels` or `fine_label`. For `embeddings`, "
        "that of how similar two texts are; null for `score`, `scores`, `label` or `labels`.",
        formats=(IMAGES, EMBEDDINGS),
    )
    tokenizer: str | None = own(
        None,
        "Folder of a tokenizer; the name of one on the hub; `train` for a byte-level BPE that is "
        "trained on the text; null for the one in the model's folder, else `train`.",
        formats=(TEXT, CHAT, PAIRS, VISION),
    )
    vocabulary: int = own(
        4096,
        "Entries of a tokenizer that is trained.",
        least=260,
        most=2_000_000,
        formats=(TEXT, CHAT),
    )
    sequence: int = own(
        128,
        "Tokens of a sample; of `embeddings`, of a text at most.",
        least=2,
        formats=(TEXT, CHAT, PAIRS, VISION, EMBEDDINGS),
    )
    packing: str | None = own(
        None,
        "How documents fill a sample: `separate` (attention stays inside a document, positions "
        "begin anew), `joined` (attention crosses their boundaries), `none` (one document a "
        "sample, cut or padded); null for `separate` where the model can do it, else `joined`.",
        choices=PACKINGS,
        formats=(TEXT, CHAT),
    )
    held_out: float = own(
        0.05,
        "Fraction of the documents that the model is only evaluated on, where there is no split "
        "for it.",
        least=0,
        most=0.5,
    )
    max_bytes: int | None = own(
        None, "Text to read at most; null for all.", least=1, formats=(TEXT, CHAT)
    )
    streaming: bool = own(
        False,
        "Whether data is read while training, instead of being prepared in the output folder. It "
        "needs `max_steps`.",
    )
    shuffle_buffer: int = own(
        1000,
        "With `streaming`, documents among which the next one is drawn; 0 for none.",
        least=0,
        formats=(TEXT, CHAT, IMAGES),
    )
    eval_samples: int | None = own(
        None, "Samples to evaluate with at most; null for all, with `streaming` 256.", least=1
    )
    chat_template: str | None = own(
        None,
        "Chat template of `chat`, `pairs` and `vision`: a Jinja file, or `chatml`; null for the "
        "tokenizer's own.",
        formats=(CHAT, PAIRS, VISION),
    )
    prompt_loss: bool = own(
        False,
        "Whether tokens of prompts count in the loss of `chat` and `vision`.",
        formats=(CHAT, VISION),
    )
    mlm_probability: float = own(
        0.15,
        "Fraction of the tokens that are masked, or for T5 and its kind removed in spans.",
        least=0.01,
        most=0.5,
        formats=(TEXT,),
    )
    mean_span: float = own(
        3.0, "Mean length in tokens of a removed span.", least=1, formats=(TEXT,)
    )
    augment: bool = own(
        True,
        "Whether training images are cropped and mirrored at random, instead of at the centre.",
        formats=(IMAGES,),
    )

    @property
    def name(self) -> str:
        """What the data is called in messages."""
        if self.mix is None:
            return self.source
        return ", ".join(str(one.get("source")) for one in self.mix)


@dataclass(frozen=True, slots=True)
class PreferenceRecipe:
    """Section `preference`: how a model learns from pairs of answers."""

    beta: float = own(0.1, "How strongly the model is held to what it was: DPO's beta.", least=0)
    loss_type: str = own(
        "sigmoid",
        "Loss of a pair, by TRL's name: `sigmoid` (DPO), `hinge`, `ipo` or `robust`.",
        choices=("sigmoid", "hinge", "ipo", "robust"),
    )
    label_smoothing: float = own(
        0.0, "Probability that a pair is the wrong way round.", least=0, most=0.5
    )
    precompute_ref_log_probs: bool = own(
        False,
        "Whether log-probabilities of what the model was are computed once, before training. Else "
        "a frozen copy of it, or without adapters the base model, runs beside it.",
    )


@dataclass(frozen=True, slots=True)
class ColumnsOfLoss:
    """Columns that a loss of embeddings reads.

    Args:
        least_texts: columns of texts at least.
        most_texts: columns of texts at most; None for any number.
        label: what there is beside the texts, in words; empty for nothing.
    """

    least_texts: int
    most_texts: int | None
    label: str = ""


_RANKING = ColumnsOfLoss(2, None)
_SCORED = ColumnsOfLoss(2, 2, "how similar both are")
_JUDGED = ColumnsOfLoss(2, 2, "1 for texts that belong together, else 0")

EMBEDDING_LOSSES: Mapping[str, ColumnsOfLoss] = {
    "MultipleNegativesRankingLoss": _RANKING,
    "CachedMultipleNegativesRankingLoss": _RANKING,
    "MultipleNegativesSymmetricRankingLoss": _RANKING,
    "CachedMultipleNegativesSymmetricRankingLoss": _RANKING,
    "TripletLoss": ColumnsOfLoss(3, 3),
    "CoSENTLoss": _SCORED,
    "AnglELoss": _SCORED,
    "CosineSimilarityLoss": _SCORED,
    "ContrastiveLoss": _JUDGED,
    "OnlineContrastiveLoss": _JUDGED,
}
"""Losses of embeddings by sentence-transformers' names, and what they read."""


@dataclass(frozen=True, slots=True)
class EmbeddingsRecipe:
    """Section `embeddings`: how a model learns which texts belong together."""

    loss: str = own(
        "MultipleNegativesRankingLoss",
        "Loss by sentence-transformers' name. Of texts that belong together, and perhaps some that "
        "do not: `MultipleNegativesRankingLoss`, for which other texts of a batch are negatives, "
        "its forms `Cached…` and `…Symmetric…`, and `TripletLoss`. Of pairs with a score: "
        "`CoSENTLoss`, `AnglELoss`, `CosineSimilarityLoss`. Of pairs with 0 or 1: "
        "`ContrastiveLoss`, `OnlineContrastiveLoss`.",
        choices=tuple(EMBEDDING_LOSSES),
    )
    loss_arguments: dict[str, Any] = own(
        dict,
        "Arguments of the loss by its own names, such as `scale` or `gather_across_devices: true` "
        "for negatives from the batches of all replicas.",
    )
    matryoshka_dims: list[int] | None = own(
        None,
        "Sizes to which embeddings may be cut, at each of which the loss counts "
        "(`MatryoshkaLoss`); null for whole ones alone.",
    )
    pooling: str | None = own(
        None,
        "How embeddings of tokens become one of a text; null for that of a SentenceTransformer's "
        "folder, else for the mean, or for the last token of a causal model.",
        choices=("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"),
    )
    columns: list[str] | None = own(
        None,
        "Columns of texts in the order in which the loss takes them: the anchor, what belongs to "
        "it, and negatives; null for all columns beside the score, in their order.",
    )
    prompts: str | dict[str, Any] | None = own(
        None, "Text in front of all texts, or by column; null for none."
    )
    batch_sampler: str = own(
        "batch_sampler",
        "How batches are drawn: `batch_sampler` for any samples, `no_duplicates` for none with a "
        "text twice, which would be a negative of itself, or `no_duplicates_hashed`, the same for "
        "large datasets.",
        choices=("batch_sampler", "no_duplicates", "no_duplicates_hashed"),
    )
    pad_to_multiple_of: int = own(
        32,
        "Texts of a batch are padded to a multiple of so many tokens. Each new length is laid out "
        "when it comes, so more leaves fewer of them.",
        least=1,
    )


@dataclass(frozen=True, slots=True)
class Degrees:
    """Section `parallel`: how many ranks share the work, and how.

    The number of ranks is dp × tp × pp × cp.
    """

    dp: int | None = own(
        None, "Data parallel degree; null for 1, or with `plan: auto` for what the plan chooses."
    )
    tp: int | None = own(None, "Tensor parallel degree; null as for dp.")
    pp: int | None = own(None, "Pipeline parallel degree; null as for dp.")
    cp: int | None = own(None, "Context parallel degree; null for 1.")
    elastic: bool = own(
        False, "Whether torchrun may start fewer ranks, as of `merak.init(elastic=True)`."
    )
    ranks: int | None = own(
        None,
        "Number of ranks that `plan: auto` is for, where torchrun does not start them; null for "
        "one on every GPU of the machine, and on the CPU for as few as the degrees allow.",
    )
    ep: int | None = own(
        None,
        "Expert parallel degree: that of tp, or where tp is 1 a divisor of dp × cp; null for 1.",
    )

    def axes(self) -> dict[str, int]:
        """Return the degrees by axis; 1 for one that is not given."""
        given = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        return {axis: 1 if degree is None else degree for axis, degree in given.items()}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, unless a plan is to be searched for more."""
        return math.prod(self.axes().values()) if self.ranks is None else self.ranks


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of one training run.

    Args:
        model: what is trained.
        data: what it is trained on.
        parallel: the degrees.
        arguments: fields of `merak.MerakArguments`; `output_dir` is where results go.
        plan: file of a plan, whose degrees and layout count; "auto" to search the fastest one for
            the devices that are there; null for none.
        lora: fields of `peft.LoraConfig`; null to train all weights.
        preference: how pairs of answers are learned from; null for data of other formats.
        embeddings: how embeddings of texts are learned; null for data of other formats.
        origins: where the fields are written.
    """

    model: ModelRecipe
    data: DataRecipe
    parallel: Degrees
    arguments: dict[str, Any]
    plan: str | None = None
    lora: dict[str, Any] | None = None
    preference: PreferenceRecipe | None = None
    embeddings: EmbeddingsRecipe | None = None
    origins: Origins = field(default=Origins(), compare=False, repr=False)

    @property
    def output_dir(self) -> Path:
        """Folder of the run's results."""
        return Path(str(self.arguments["output_dir"])).expanduser()

    @property
    def data_dir(self) -> Path:
        """Folder of prepared data."""
        return self.output_dir / "data"


SECTIONS: Mapping[str, tuple[type, str]] = {
    "model": (ModelRecipe, "What is trained."),
    "data": (DataRecipe, "What it is trained on."),
    "parallel": (Degrees, "How many ranks share the work, and how."),
    "preference": (PreferenceRecipe, "How pairs of answers are learned from."),
    "embeddings": (EmbeddingsRecipe, "How embeddings of texts are learned."),
}
"""Sections with fields of their own, each with its meaning; `arguments` and `lora` have others'."""

FORMATS_OF_SECTIONS: Mapping[str, str] = {"preference": PAIRS, "embeddings": EMBEDDINGS}
"""Sections that may be left out, by the format of data that they are for."""

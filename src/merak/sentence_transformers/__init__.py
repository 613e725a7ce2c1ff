"""sentence-transformers' trainer on a mesh of ranks: a script of its own with the import changed.

import merak
from merak.sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

merak.init(pp=2)
args = SentenceTransformerTrainingArguments("out")
trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss)
trainer.train()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from merak.core.packages import refuse_missing

if TYPE_CHECKING:
    from merak.sentence_transformers.trainer import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

NO_PLAN = (
    "'auto' would choose the samples of a microbatch, which are each other's negatives in losses "
    "of sentence-transformers; give the degrees, and a number as per_device_train_batch_size."
)
"""Why neither a plan nor a microbatch is searched for these trainings."""

__all__ = ["SentenceTransformerTrainer", "SentenceTransformerTrainingArguments"]


def __getattr__(name: str) -> Any:
    """Import the trainer or its arguments when they are first used, with sentence-transformers.

    Raises:
        PackageError: sentence-transformers is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module 'merak.sentence_transformers' has no attribute {name!r}")
    refuse_missing("sentence_transformers", f"merak.sentence_transformers.{name}")
    return getattr(import_module("merak.sentence_transformers.trainer"), name)

"""TRL's trainers on a mesh of ranks: a script of TRL's with the import changed.

import merak
from merak.trl import SFTConfig, SFTTrainer

merak.init(pp=2)
trainer = SFTTrainer(model, args=SFTConfig("out"), train_dataset=data)
trainer.train()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from merak.core.packages import refuse_missing

if TYPE_CHECKING:
    from merak.trl.trainers import (
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    """Import a trainer or its arguments when it is first used, with TRL.

    Raises:
        PackageError: TRL is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module 'merak.trl' has no attribute {name!r}")
    refuse_missing("trl", f"merak.trl.{name}")
    return getattr(import_module("merak.trl.trainers"), name)

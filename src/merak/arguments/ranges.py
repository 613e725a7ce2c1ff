"""Ranges of all numbers among the arguments, as one table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from merak.plan import options
from merak.plan.options import LARGEST, Range, range_problem

_COUNT = Range(1, LARGEST, "use a whole number of 1 or more")
_COUNT_OR_NONE = Range(0, LARGEST, "use a whole number of 0 or more")
_AMOUNT = Range(0, LARGEST, "use a finite number of 0 or more")
_BETA = Range(0, math.nextafter(1, 0), "use a number of 0 or more and below 1")
_NUMBER = Range(-math.inf, math.inf, "use a number")
_SEED = Range(0, 2**32 - 1, "use a whole number from 0 to 4294967295")

RANGES: Mapping[str, Range] = {
    **options.RANGES,
    "max_skipped_steps": Range(0, LARGEST, "use 0 or more", "is no number of steps"),
    "max_rollbacks": Range(0, LARGEST, "use 0 or more", "is no number of rollbacks"),
    "check_replicas_steps": Range(0, LARGEST, "use 0 or more", "is no number of steps"),
    "sigterm_limit_s": _AMOUNT,
    "ddp_bucket_cap_mb": options.RANGES["bucket_bytes"],
    "global_batch": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "dataloader_num_workers": _COUNT_OR_NONE,
    "dataloader_prefetch_factor": _COUNT,
    "learning_rate": _AMOUNT,
    "weight_decay": _AMOUNT,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _AMOUNT,
    "warmup_steps": _AMOUNT,
    "max_grad_norm": _NUMBER,
    "num_train_epochs": _AMOUNT,
    "eval_delay": _AMOUNT,
    "logging_steps": _AMOUNT,
    "save_steps": _NUMBER,
    "seed": _SEED,
    "data_seed": _SEED,
}
"""Range of every field that is a number; None, where a field may be None, is always accepted."""


def range_problems(arguments: Any, but: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for every number that is out of its range.

    Args:
        arguments: to look at.
        but: names of those that are no numbers.
    """
    for name, allowed in RANGES.items():
        if name in but:
            continue
        yield from range_problem(f"{name}=", getattr(arguments, name, None), allowed)


def loader_problems(arguments: Any) -> Iterator[str]:
    """Yield a sentence for every option of loader workers where there are none."""
    if arguments.dataloader_num_workers:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(arguments, name):
            yield (
                f"{name}={getattr(arguments, name)!r} is for the loader's workers, but "
                "dataloader_num_workers=0; set that to 1 or more, or leave the other out."
            )

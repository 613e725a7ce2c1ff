"""The last step of an epoch: replicas with unequal numbers of microbatches are refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader

from merak.arguments import MerakArguments
from merak.core.errors import DataError
from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)


def refuse_unequal_replicas(
    args: MerakArguments,
    loader: DataLoader[Any] | Sized,
    dp_degree: int,
    updates_inside: bool = False,
    spread_experts: int = 1,
) -> None:
    """Refuse a dataset whose last step gives replicas different numbers of microbatches.

    Args:
        args: of the job.
        loader: of a single process, as transformers makes it; only its length counts.
        dp_degree: data parallel degree.
        updates_inside: whether the schedule is asynchronous.
        spread_experts: replicas that have the experts of a layer between them.

    Raises:
        DataError: training comes to a step that is not equal.
    """
    reason = ""
    if args.zero == 3:
        reason = "zero=3 gathers parameters on all replicas together"
    if spread_experts > 1:
        reason = f"ep={spread_experts} sends tokens to the experts of other replicas"
    if updates_inside:
        reason = f"schedule={args.schedule!r} updates weights on all replicas together"
    if not reason or dp_degree == 1 or args.dataloader_drop_last:  # which drops such a round
        return
    try:
        num_batches = len(loader)
    except TypeError:
        warn_on_rank0(
            logger,
            "%s, and the length of the dataset is not known: if its last batches are not a "
            "multiple of dp=%d, the job ends there; leave them out (dataloader_drop_last=True).",
            reason,
            dp_degree,
        )
        return
    rest = num_batches % dp_degree
    last_step = math.ceil(
        math.ceil(num_batches / dp_degree) / args.gradient_accumulation_steps
    )  # of the first epoch, numbered from 1
    if not rest or _num_steps(args, last_step) < last_step:
        return
    raise DataError(
        f"{reason}, but the {num_batches} batches of an epoch are no multiple of dp={dp_degree}, "
        f"so that step {last_step} would have more on {rest} of the replicas than on the others; "
        "leave them out (dataloader_drop_last=True), give a dataset of another length"
        + (f", or end before it (max_steps={last_step - 1})." if last_step > 1 else ".")
    )


def _num_steps(args: MerakArguments, per_epoch: int) -> int:
    """The number of training steps of the job, as transformers counts them."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)

"""What training logs beside losses: tokens per second of the whole job, and memory of a device."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.training_args import trainer_log_levels

if TYPE_CHECKING:
    from merak.arguments import MerakArguments
    from merak.trainer.batch_exchange import BatchExchange

_PASSIVE = "passive"
_GB = 1e9


def announced_level(args: MerakArguments) -> int:
    """The lowest level of announcements that the user's `log_level` asks for; INFO by default."""
    if args.log_level == _PASSIVE:
        return logging.INFO
    return int(trainer_log_levels[args.log_level])


class Throughput:
    """Counts the tokens of the whole job between two logs, and the seconds that training took.

    Args:
        counts_tokens: whether the elements of the model's main input are tokens at all.
    """

    def __init__(self, counts_tokens: bool = False) -> None:
        self._counts_tokens = counts_tokens
        self._tokens = 0
        self._since_s = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count the input tokens of a step, over all replicas and microbatches."""
        self._tokens += tokens

    def take(self) -> float | None:
        """Tokens per second since the last time; None where there are none to count."""
        now = time.perf_counter()
        seconds, tokens = now - self._since_s, self._tokens
        self._since_s, self._tokens = now, 0
        return tokens / seconds if self._counts_tokens and tokens and seconds > 0 else None

    def leave_out(self, begin_s: float) -> None:
        """Leave out what was done from a moment until now, such as an evaluation."""
        now = time.perf_counter()
        has_logged = self._since_s > begin_s
        self._since_s = now if has_logged else self._since_s + now - begin_s


class Logging(Trainer):
    """The part of `MerakTrainer` that logs."""

    _batch_exchange: BatchExchange | None
    throughput: Throughput
    # What the ranks have measured for the log that comes; empty where there is none.
    _measured: dict[str, float]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it; what an evaluation or a checkpoint takes is no training."""
        begin_s = time.perf_counter()
        if self.control.should_log and self._batch_exchange is not None:
            self._measured = self._measure(self._batch_exchange)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.throughput.leave_out(begin_s)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log some values; those of training with tokens per second and memory."""
        if "loss" in logs:
            logs |= self._measured
        self._measured = {}
        super().log(logs, *args, **kwargs)

    def _measure(self, batch_exchange: BatchExchange) -> dict[str, float]:
        """What is logged of the job; called alike on every rank."""
        found: dict[str, float] = {}
        rate = self.throughput.take()
        if rate is not None:
            found["tokens_per_second"] = round(rate, 1)
        name, own = memory_bytes(self.args.device)
        everyone = [used for used in batch_exchange.gather(own) if used is not None]
        if everyone:
            found[name] = round(max(everyone) / _GB, 3)
        return found


def memory_bytes(device: torch.device) -> tuple[str, int | None]:
    """What a rank holds: on a GPU at most so far, on the CPU now.

    Returns:
        What to call it in GB, and bytes; None where the system does not tell.
    """
    if device.type == "cuda":
        return "peak_memory_gb", torch.cuda.max_memory_allocated(device)
    return "memory_gb", _resident_bytes()


def _resident_bytes() -> int | None:
    """Resident memory of this process, where the system tells it as Linux does."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")

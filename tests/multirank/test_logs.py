"""What training logs by default: tokens of all replicas, each counted once, and memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.multirank.ranks import RankPool
from tests.multirank.training import SEQUENCE, Layout, Setup, make_merak

STEPS, MICROBATCHES, BATCH = 2, 4, 2


def train_and_log(layout: Layout) -> tuple[list[int], list[dict[str, Any]], str]:
    """Tokens that were counted in every step, what was logged, and what was said."""
    import contextlib
    import io

    import merak
    from merak.trainer.logs import Throughput

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    arguments = {
        "max_steps": STEPS, "logging_steps": 1, "log_level": "passive",
        "per_device_train_batch_size": BATCH,
    }  # fmt: skip
    setup = Setup("gpt2", num_microbatches=MICROBATCHES, padded=False, arguments=arguments)
    counted: list[int] = []
    said = io.StringIO()
    with mock.patch.object(Throughput, "add", _noting(counted)), contextlib.redirect_stderr(said):
        trainer = make_merak(setup, dp, "")
        trainer.train()
    return counted, [log for log in trainer.state.log_history if "loss" in log], said.getvalue()


def _noting(counted: list[int]) -> Any:
    from merak.trainer.logs import Throughput

    original = Throughput.add

    def add(self: Throughput, tokens: int) -> None:
        counted.append(tokens)
        original(self, tokens)

    return add


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_tokens_are_counted_once_and_the_job_is_summed_up(pool: RankPool, layout: Layout) -> None:
    found = pool.run(train_and_log, 2, layout)
    for counted, logs, _ in found:
        assert counted == [MICROBATCHES * BATCH * SEQUENCE] * STEPS
        assert len(logs) == STEPS
        assert all(log["tokens_per_second"] > 0 and log["memory_gb"] > 0 for log in logs)
    # All ranks log the same memory, of the one that holds most.
    assert found[0][1][-1]["memory_gb"] == found[1][1][-1]["memory_gb"] or layout == (1, 2, 1)
    lines = found[0][2].splitlines()
    dp, tp, pp = layout
    assert lines[0] == f"[merak] 2 ranks on 1 host (cpu): dp {dp} × tp {tp} × pp {pp}"
    assert lines[1] == "[merak] tracing GPT2LMHeadModel …"
    assert any("forecast memory of a rank" in line for line in lines)
    assert lines[-1].startswith("[merak] building the stages took ")
    assert "[merak]" not in found[1][2]

"""What training logs by default: tokens of all replicas, each counted once, and memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import TrainerCallback

from tests.multirank.ranks import RankPool
from tests.multirank.training import SEQUENCE, Layout, Setup, make_merak, model_of
from tests.tiers import slow

STEPS, MICROBATCHES, BATCH = 2, 4, 2


def train_and_log(layout: Layout) -> tuple[list[int], list[dict[str, Any]], str, Any, list[str]]:
    """Tokens of every step, what was logged, what was said, the record, and the ranges traced."""
    import contextlib
    import io

    import merak
    from merak.record.files import read_run
    from merak.trainer.logs import Throughput

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    arguments = {
        "max_steps": STEPS, "logging_steps": 1, "log_level": "passive", "profile_steps": 2,
        "per_device_train_batch_size": BATCH,
    }  # fmt: skip
    setup = Setup("gpt2", num_microbatches=MICROBATCHES, padded=False, arguments=arguments)
    counted: list[int] = []
    said = io.StringIO()
    with mock.patch.object(Throughput, "add", _noting(counted)), contextlib.redirect_stderr(said):
        trainer = make_merak(setup, dp, "", callbacks=[keeping := Keeping()])
        trainer.train()
    logs = [log for log in keeping.logs if "loss" in log]
    history = [log for log in trainer.state.log_history if "loss" in log]
    assert {name for log in history for name in log} == {
        "loss", "grad_norm", "learning_rate", "epoch", "step"
    }  # fmt: skip
    parameters = model_of(setup).num_parameters(exclude_embeddings=True)  # type: ignore[operator]
    assert trainer.state.total_flos == 6 * sum(counted) * parameters > 0
    record = read_run(trainer.args.output_dir) if merak.current_mesh().rank == 0 else None
    traces = list(Path(trainer.args.output_dir).glob("*/rank*"))
    assert [path.name for path in traces] == [f"rank{merak.current_mesh().rank}.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return counted, logs, said.getvalue(), record, ranges


class Keeping(TrainerCallback):
    """Keeps what loggers get."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def _noting(counted: list[int]) -> Any:
    from merak.trainer.logs import Throughput

    original = Throughput.add

    def add(self: Throughput, tokens: int, microbatches: int) -> None:
        counted.append(tokens)
        original(self, tokens, microbatches)

    return add


@pytest.mark.parametrize("layout", [(2, 1, 1), slow((1, 2, 1)), slow((1, 1, 2))])
def test_tokens_are_counted_once_and_the_job_is_summed_up(pool: RankPool, layout: Layout) -> None:
    found = pool.run(train_and_log, 2, layout)
    for counted, logs, *_ in found:
        assert counted == [MICROBATCHES * BATCH * SEQUENCE] * STEPS
        assert len(logs) == STEPS
        assert all(log["tokens_per_second"] > 0 and log["memory_gb"] > 0 for log in logs)
    # All ranks log the same memory, of the one that holds most.
    assert found[0][1][-1]["memory_gb"] == found[1][1][-1]["memory_gb"] or layout == (1, 2, 1)
    lines = found[0][2].splitlines()
    dp, tp, pp = layout
    for rank, (*_, ranges) in enumerate(found):
        stage = rank if pp > 1 else 0
        actions = {f"{kind} {number}, stage {stage}" for kind in ("forward", "backward")
                   for number in range(MICROBATCHES // dp)}  # fmt: skip
        assert {name for name in ranges if "stage" in name and "wait" not in name} == actions
        assert ranges.count("step 2") == 1 and "step 1" not in ranges
        assert "Optimizer.step#AdamW.step" in ranges
        assert f"wait for the gradient norm over tp and pp with rank {1 - rank}" in ranges or dp > 1
    assert lines[0] == f"[merak] 2 ranks on 1 host (cpu): dp {dp} × tp {tp} × pp {pp}"
    assert lines[1] == "[merak] tracing GPT2LMHeadModel …"
    assert any("forecast of a rank" in line for line in lines)
    assert any(line.startswith("[merak] building the stages took ") for line in lines)
    assert lines[-1].startswith("[merak] the weights of step 2 are in ") or tp * pp == 1
    assert "[merak]" not in found[1][2]
    record, logs = found[0][3], found[0][1]
    assert [log.step for log in record.logs] == [1, 2]
    assert [log.figures["loss"] for log in record.logs] == [log["loss"] for log in logs]
    assert all(len(log.memory_bytes) == pp for log in record.logs)
    # What a process held before it had its weights is its own, for rank 0 holds other things, too.
    assert len(record.job.base_bytes) == pp and all(record.job.base_bytes)
    assert [step.step for step in record.steps] == [0, 1]
    for step in record.steps:
        assert [len(own) for own in step.records] == [2 * MICROBATCHES // (dp)] * pp
        for (begin, end), own in zip(step.spans, step.records, strict=True):
            assert begin <= own[0][1] and own[-1][2] <= end
    assert sum(map(len, record.job.stages)) == len(record.job.segments)
    if pp > 1:  # all ranks log the same bubble, of which each has a part
        assert found[0][1][-1]["bubble"] == found[1][1][-1]["bubble"]
        assert 0 < logs[-1]["bubble"] < 1 and len(record.logs[-1].busy) == pp
        assert logs[-1]["memory_gb_pp1"] > 0

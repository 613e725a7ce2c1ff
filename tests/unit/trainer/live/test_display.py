"""The display of a job: a line for each log in a file, a panel in a terminal."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerState

from merak.core.units import step_time
from merak.engine.health.figures import Figures
from merak.schedule.registry import build
from merak.trainer.live import display
from merak.trainer.live.display import (
    JobBoard,
    LineDisplay,
    LiveDisplay,
    StepClock,
    display_for,
)
from merak.trainer.live.lines import duration, line, percent
from merak.trainer.live.panel import JobPanel, Progress
from merak.trainer.live.streams import handlers_moved
from tests.unit.record.runs import GB, job_of

LOGS = {
    "loss": 5.1234567, "grad_norm": 1.2, "learning_rate": 4.2e-5, "tokens_per_second": 4332.4,
    "step_seconds": 0.4731, "mfu": 0.4123, "bubble": 0.2444, "peak_memory_gb": 48.0,
    "peak_memory_gb_pp0": 48.0, "epoch": 0.5,
}  # fmt: skip
ARGS = SimpleNamespace(logging_strategy="steps")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    return now


def state_at(step: int, steps: int = 100) -> TrainerState:
    state = TrainerState(global_step=step, max_steps=steps, is_world_process_zero=True)
    state.logging_steps = 10
    return state


def test_a_log_in_a_line() -> None:
    assert line(LOGS) == (
        "loss 5.123, learning rate 4.2e-05, gradient norm 1.2, 4,332 tokens/s, 0.473 s a step, "
        "MFU 41 %, bubble 24 %, GPU memory 48 GB"
    )
    assert line({"memory_gb": 1.5}) == "process memory 1.5 GB"  # which is no forecast's part
    assert line({"eval_loss": 5.5, "eval_accuracy": 0.25, "eval_runtime": 3.0, "note": "hi"}) == (
        "eval loss 5.5, eval accuracy 0.25, note hi"
    )
    assert line({"loss": float("nan")}) == "loss nan"


def test_numbers_for_people() -> None:
    assert [duration(s) for s in (0.4, 48, 200, 7500, 273600)] == [
        "0 s", "48 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"
    ]  # fmt: skip
    assert [percent(f) for f in (0.244, 0.0312, 0)] == ["24 %", "3.12 %", "0 %"]
    assert [step_time(s) for s in (0.0854, 0.473, 12.44)] == ["85.4 ms", "0.473 s", "12.4 s"]


def test_the_time_that_is_left(clock: list[float]) -> None:
    steps = StepClock()
    assert steps.left_s(state_at(0)) is None
    steps.begin()
    clock[0] += 30.0  # the first step compiles and warms up
    steps.end()
    for _ in range(20):
        clock[0] += 2.0
        steps.end()
    assert steps.left_s(state_at(90)) == pytest.approx(20.0)
    clock[0] += 500.0  # an evaluation
    steps.leave_out()
    clock[0] += 2.0
    steps.end()
    assert steps.left_s(state_at(90)) == pytest.approx(20.0)
    assert steps.left_s(state_at(90, steps=0)) is None


def test_lines_in_a_file(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineDisplay(JobBoard())
    shown.on_step_begin(ARGS, state_at(9), None)
    clock[0] += 2.0
    shown.on_step_end(ARGS, state_at(10), None)
    shown.on_log(ARGS, state_at(10), None, dict(LOGS))  # type: ignore[arg-type]
    shown.on_log(ARGS, state_at(10), None, {"eval_loss": 5.5})  # type: ignore[arg-type]
    shown.on_log(ARGS, state_at(100), None, {"train_runtime": 75.0, "train_loss": 5.25})  # type: ignore[arg-type]
    other = TrainerState(global_step=10, max_steps=100, is_world_process_zero=False)
    shown.on_log(ARGS, other, None, dict(LOGS))  # type: ignore[arg-type]
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("[merak] step 10/100: loss 5.123, ")
    assert first.endswith(", 3 min 0 s left")
    assert second == "[merak] step 10/100: eval loss 5.5"
    assert last == "[merak] trained to step 100 in 1 min 15 s: mean loss 5.25"


def drawn(panel: JobPanel, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(panel)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_panel_fits_its_terminal(width: int) -> None:
    job = job_of(build("1f1b", 4, 8), (4, 4, 4, 4))
    segments = tuple(replace(own, name=f"model.decoder.{own.name}") for own in job.segments)
    job = replace(job, segments=segments)
    figures = Figures(memory_bytes=(48 * GB, 58 * GB, None, 40 * GB), busy=(0.7, 0.75, 0.8, 0.85))
    lines = drawn(JobPanel(job, Progress(40, 100, 200.0), LOGS, figures), width)
    assert max(map(len, lines)) == min(width, 110)
    text = "\n".join(lines)
    for part in (
        "Model, 16,000 parameters, dp 2 × tp 1 × pp 4 on 8 ranks", "step 40 of 100",
        "3 min 20 s left", "loss 5.123", "MFU 41 %", "bubble 24 %", "48.0 GB", "50.0 GB", "85 %",
        "segments", "forecast",
    ):  # fmt: skip
        assert part in text
    assert len([own for own in lines if "layers." in own]) == 4


def test_a_panel_before_anything_is_known() -> None:
    text = "\n".join(drawn(JobPanel(None, Progress(0, 100), next_log="the first figures come"), 80))
    assert "step 0 of 100" in text and "the first figures come" in text


def test_a_long_pipeline_shows_its_ends() -> None:
    job = job_of(build("1f1b", 64, 64), (1,) * 64)
    lines = drawn(JobPanel(job, Progress(1, 2)), 100)
    assert len(lines) < 22 and any("126–127" in own for own in lines)


def test_a_terminal_is_drawn_over_and_left_in_order(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logging.getLogger("merak.somewhere").addHandler(handler)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    shown = display_for(JobBoard(), lines_only=False)
    assert isinstance(shown, LiveDisplay)
    shown.on_train_begin(ARGS, state_at(0), None)
    assert "the first figures come at step 10" in terminal.getvalue()
    assert handler.stream is not terminal  # what is logged comes above the panel
    clock[0] += 2.0
    shown.on_step_end(ARGS, state_at(1), None)
    shown.on_log(ARGS, state_at(10), None, dict(LOGS))  # type: ignore[arg-type]
    shown.on_log(ARGS, state_at(10), None, {"eval_loss": 5.5})  # type: ignore[arg-type]
    batches: Any = [0, 1, 2]
    clock[0] += 2.0
    shown.on_prediction_step(ARGS, state_at(10), None, batches)
    shown.close()
    shown.close()  # an error ends training where it has ended already
    assert handler.stream is terminal
    written = terminal.getvalue()
    for part in ("loss 5.123", "step 10/100: eval loss 5.5", "evaluating, batch 1 of 3"):
        assert part in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is back
    logging.getLogger("merak.somewhere").removeHandler(handler)


@pytest.mark.parametrize(("term", "lines_only"), [("dumb", False), ("xterm", True)])
def test_where_there_are_lines_in_a_terminal(
    term: str, lines_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", term)
    assert isinstance(display_for(JobBoard(), lines_only=lines_only), LineDisplay)


def test_handlers_of_other_streams_stay() -> None:
    old, new, other = io.StringIO(), io.StringIO(), io.StringIO()
    logger = logging.getLogger("merak.elsewhere")
    handlers = [logging.StreamHandler(old), logging.StreamHandler(other)]
    for own in handlers:
        logger.addHandler(own)
    with handlers_moved(old, new):
        assert [own.stream for own in handlers] == [new, other]
    assert [own.stream for own in handlers] == [old, other]
    for own in handlers:
        logger.removeHandler(own)

"""The summary before the first step, and the hint that a pipeline is idle."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from merak.cli.memory_report import page as memory_page
from merak.cli.memory_report import report_on
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta, largest_shape
from merak.core.units import size
from merak.engine import forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.cost.device import preset
from merak.plan.engine_options import EngineOptions
from merak.plan.memory.non_tensor import non_tensor_memory
from merak.plan.step_plans import StepPlans
from merak.plan.summary import bubble, describe_mesh, idle_pipeline, summary
from tests.unit.graph import families

SAMPLE = (
    ("input_ids", TensorMeta((2, 16), torch.int64)),
    ("labels", TensorMeta((2, 16), torch.int64)),
)


def drawn(mesh: Mesh, **options: object) -> list[str]:
    chosen = EngineOptions(partition=None, num_microbatches=4, **options)  # type: ignore[arg-type]
    model: nn.Module = families.gpt2(2)
    return summary(forecast_of(GraphSource(model), SAMPLE, mesh, chosen), SAMPLE).splitlines()


def mesh_of(dp: int, tp: int, pp: int) -> Mesh:
    return Mesh(dp, tp, pp, 0, torch.device("cpu"), None)


def test_a_job_in_a_few_lines() -> None:
    lines = drawn(mesh_of(1, 2, 2))
    parameters = sum(p.numel() for p in families.gpt2(2).parameters())
    assert lines[0].startswith("GPT2LMHeadModel: ") and lines[0].endswith(" segments")
    assert f"{parameters:,} parameters" in lines[0]
    assert lines[1].strip() == (
        "1f1b: 4 microbatches of 2 × 16 a step and replica, bubble 20% of all time"
    )
    head, *rows = [line.split("  ") for line in lines[3:]]
    assert [cell.strip() for cell in head if cell.strip()] == [
        "ranks", "stages", "segments", "parameters", "memory forecast"
    ]  # fmt: skip
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:2] for row in cells] == [["0–1", "0"], ["2–3", "1"]]
    assert all(row[-1].endswith((" kB", " MB")) for row in cells)
    assert len({len(line) for line in lines[4:]}) == 1  # numbers are aligned


def test_a_gpu_has_memory_that_the_forecast_does_not_count() -> None:
    found = forecast_of(
        GraphSource(families.gpt2(2)), SAMPLE, mesh_of(1, 1, 2), EngineOptions(num_microbatches=1)
    )
    device = preset("h100")
    (line,) = [
        own
        for own in summary(found, SAMPLE, device).splitlines()
        if own.startswith("  forecast of a rank")
    ]
    assert str(non_tensor_memory(device.memory_bytes or 0, found.mesh)) in line


def test_the_largest_column_tells_what_a_microbatch_is() -> None:
    """Not the first one, such as the class of an image, or the decoder's few tokens."""
    columns = {"labels": (4,), "pixel_values": (4, 3, 8, 8), "scale": ()}
    sample = tuple((name, TensorMeta(shape, torch.float32)) for name, shape in columns.items())
    assert largest_shape(sample) == (4, 3, 8, 8)
    assert largest_shape(sample[2:]) == ()


def test_one_rank_has_no_bubble() -> None:
    lines = drawn(mesh_of(1, 1, 1))
    assert "bubble" not in lines[1] and len(lines) == 5


def test_ranks_with_several_stages() -> None:
    lines = drawn(mesh_of(2, 1, 2), schedule="zero_bubble_v")
    assert [line.split()[:3] for line in lines[4:]] == [
        ["0–1", "0,", "3"],
        ["2–3", "1–2", lines[5].split()[2]],
    ]


@pytest.mark.parametrize(("factor", "said"), [(None, False), (1.25, True)])
def test_a_capacity_of_experts_is_said(factor: float | None, said: bool) -> None:
    options = EngineOptions(partition=None, num_microbatches=1, expert_capacity=factor)
    model = GraphSource(families.mixtral(2))
    lines = summary(forecast_of(model, SAMPLE, mesh_of(1, 1, 1), options), SAMPLE).splitlines()
    words = "  expert_capacity=1.25: each expert computes at most 1.25 times its even share"
    assert any(line.startswith(words) for line in lines) is said


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (0, None),
        (2**29, None),
        (2**30, "no logits take less memory in chunks of this size"),
        (2**10, "the logits of lm_head.weight are made for "),
    ],
)
def test_a_head_in_chunks_is_said(chunk: int, said: str | None) -> None:
    options = EngineOptions(partition=None, num_microbatches=1, loss_chunk_bytes=chunk)
    model = GraphSource(families.mixtral(2))
    lines = summary(forecast_of(model, SAMPLE, mesh_of(1, 1, 1), options), SAMPLE).splitlines()
    found = [line for line in lines if line.startswith("  loss_chunk_bytes: ")]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(("device", "said"), [("cuda", True), ("cpu", False)])
def test_experts_in_float32_under_autocast_are_said_on_gpus(device: str, said: bool) -> None:
    chosen = EngineOptions(partition=None, num_microbatches=1)
    source = GraphSource(families.mixtral(2), autocast=torch.bfloat16)
    found = forecast_of(source, SAMPLE, mesh_of(1, 1, 1), chosen)
    there = replace(found.mesh, device=torch.device(device))
    lines = summary(replace(found, mesh=there), SAMPLE).splitlines()
    assert any("autocast does not cast grouped_mm" in line for line in lines) is said
    assert any(line.startswith("  attention: flash in 2 segments") for line in lines) is said


@pytest.mark.parametrize(
    ("hosts", "tied", "said"),
    [
        (("a", "b"), "microbatch", True),
        (("a", "b"), "step", False),
        ((), "microbatch", False),
    ],
)
def test_tied_weights_on_several_hosts_are_said(
    hosts: tuple[str, ...], tied: str, said: bool
) -> None:
    mesh = replace(mesh_of(1, 1, 2), hosts=hosts)
    table = families.gpt2(2).get_input_embeddings().weight
    sentence = (
        f"  pp ranks on several hosts exchange the gradients of tied weights "
        f"({size(4 * table.numel())}) after each of 4 microbatches; tied_gradients='step' "
        "exchanges them once"
    )
    assert (sentence in drawn(mesh, tied_gradients=tied)) is said


def test_memory_that_cannot_be_foreseen_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("looks at numbers")

    monkeypatch.setattr("merak.plan.activations.forecast.MemoryModel", fail)
    assert all(line.endswith(" unknown") for line in drawn(mesh_of(1, 1, 2))[4:])


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [((), "4 ranks on 1 host (cpu): dp 1 × tp 2 × pp 2"),
     (("a", "a", "b", "b"), "4 ranks on 2 hosts (2 ranks on a, 2 on b) (cpu): "
      "dp 1 × tp 2 × pp 2, with pp across hosts")],
)  # fmt: skip
def test_a_mesh_in_a_line(hosts: tuple[str, ...], expected: str) -> None:
    assert describe_mesh(replace(mesh_of(1, 2, 2), hosts=hosts)) == expected


def test_an_idle_pipeline_is_told_of_with_a_fix() -> None:
    said = idle_pipeline(StepPlans("1f1b", 4, 1), "gradient_accumulation_steps")
    assert said == (
        "gradient_accumulation_steps=1 gives the pipeline of 4 ranks 1 microbatch a step, which "
        "leaves them idle 75% of the time; gradient_accumulation_steps=16 would leave 16%."
    )


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches"), [("1f1b", 1, 1), ("1f1b", 4, 4), ("zero_bubble_v", 4, 8)]
)
def test_a_pipeline_that_is_busy_is_not(schedule: str, pp: int, microbatches: int) -> None:
    assert idle_pipeline(StepPlans(schedule, pp, microbatches), "num_microbatches") is None


def test_a_schedule_from_a_file_is_told_of_without_figures(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    from merak.schedule.registry import build
    from merak.schedule.serialize import to_text

    path.write_text(to_text(build("1f1b", 4, 2)))
    said = idle_pipeline(StepPlans(str(path), 4, 2), "num_microbatches")
    assert said is not None and said.endswith("; use more, such as num_microbatches=16.")


def test_the_bubble_is_the_schedules() -> None:
    assert bubble(StepPlans("1f1b", 4, 12).base.schedule) == pytest.approx(3 / 15)


def test_progress_has_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "merak.core.announce"):
        drawn(mesh_of(1, 1, 2))
    said = [record.getMessage() for record in caplog.records if "announce" in record.name]
    assert said[0] == "tracing GPT2LMHeadModel …"
    assert said[1].startswith("tracing GPT2LMHeadModel took ") and "segments" in said[1]
    assert said[2] == "planning …" and said[3].startswith("planning took ")


class Doubled(nn.Module):
    """A block that no trace follows inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return 2 * y if y.max() > 0.6 else y


class TwoDoubled(nn.Module):
    """Two of them, and layers that trace."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Linear(8, 8), Doubled(), nn.Linear(8, 8), Doubled(), nn.Linear(8, 1))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_segments_on_autograd_are_named_with_what_they_hold(recompute: str) -> None:
    sample = (("x", TensorMeta((4, 8), torch.float32)),)
    options = EngineOptions(num_microbatches=1, recompute=recompute)
    found = forecast_of(GraphSource(TwoDoubled()), sample, mesh_of(1, 1, 1), options)
    (own,) = found.on_autograd
    assert len(own.names) == len(own.segments) == 2
    assert own.reason == "it calls opaque_call"
    memory = [found.memory.segments[index].saved_bytes for index in own.segments]
    assert min(memory) >= 4 * 8 * 4  # tanh saves its result
    assert own.saved_bytes == (sum(memory) if recompute == "off" else 0)
    assert f"  {own}" in summary(found, sample).splitlines()
    assert f"  {own}" in memory_page(report_on("TwoDoubled", found, None)).splitlines()


def test_a_job_of_graphs_names_no_segments_on_autograd() -> None:
    assert not any("autograd" in line for line in drawn(mesh_of(1, 1, 2)))

"""The benchmark of one device, with tiny models on the CPU, and the page that it writes."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from merak.core import mesh

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts find each other as when one of them is run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def gpu(folder_of_scripts: None) -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def forked(folder_of_scripts: None) -> ModuleType:
    return importlib.import_module("tools.forked")


@pytest.fixture(autouse=True)
def no_mesh() -> Iterator[None]:
    mesh.reset()
    yield
    mesh.reset()


@pytest.fixture
def cases(folder_of_scripts: None) -> ModuleType:
    return importlib.import_module("tools.gpu_cases")


def rows(gpu: ModuleType, name: str) -> list[dict[str, Any]]:
    found = list(gpu.PARTS[name].rows("cpu", Path(), 1e9))
    assert found
    assert not [row["failed"] for row in found if "failed" in row]
    return found


@pytest.mark.slow
def test_attention_is_computed_as_in_plain_pytorch(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = gpu.gpu_parts
    monkeypatch.setattr(parts, "MODELS", {name: parts.MODELS[name] for name in ("gpt2", "bert")})
    found = rows(gpu, "attention")
    assert len(found) == 4
    assert all(row["merak"] == row["plain PyTorch"] != "none" for row in found)
    assert "flash" in found[0]["merak"]  # is_causal, and no mask


@pytest.mark.slow
def test_memory_is_forecast_and_measured(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = gpu.gpu_parts
    monkeypatch.setattr(parts, "MODELS", {"llama": parts.MODELS["llama"]})
    found = rows(gpu, "memory")
    assert [row["recompute"] for row in found] == ["off", "full"]
    assert all(abs(row["off by %"]) < 5 for row in found)


@pytest.mark.slow
def test_offloaded_activations_are_timed_and_counted(gpu: ModuleType) -> None:
    found = rows(gpu, "offload")
    assert [row["activations"] for row in found] == list(gpu.gpu_jobs.CHOICES)
    copied = [float(row["host memory, GB"]) for row in found]
    assert copied[0] == 0.0 < copied[1] == copied[2]
    assert all(float(row["seconds of a step"]) > 0 for row in found)
    assert [hidden for row in found if (hidden := row.get("copies hidden"))]


@pytest.mark.slow
def test_an_optimizer_in_host_memory_is_timed(gpu: ModuleType) -> None:
    found = rows(gpu, "optimizer")
    assert [row["states"] for row in found] == list(gpu.gpu_jobs.HOMES)
    assert len({row["loss"] for row in found if "delayed" not in row["states"]}) == 1
    assert len({row["loss"] for row in found}) == 2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [((1.0, 1.0, 2.0), "1.00"), ((1.0, 1.75, 2.0), "0.25"), ((1.0, 1.0, 1.01), "none seen")],
)
def test_the_share_of_copies_that_is_hidden(
    gpu: ModuleType, seconds: tuple[float, float, float], said: str
) -> None:
    assert gpu.gpu_jobs.hidden(*seconds) == said


@pytest.mark.slow
def test_a_rank_of_a_job_is_rehearsed_beside_its_price(gpu: ModuleType) -> None:
    found = {row["figure"]: row for row in rows(gpu, "rehearsal")}
    for figure in ("step of the job, s", "optimizer's step, s", "peak memory, GB"):
        assert float(found[figure]["measured"]) > 0 and float(found[figure]["planned"]) > 0
    assert any(figure.startswith("F of stage 0") for figure in found)


@pytest.mark.slow
def test_each_training_is_alone_in_a_process_and_all_give_the_same_loss(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = gpu.gpu_pairs
    monkeypatch.setattr(pairs, "FULL", {"GPT-2": ("gpt2", pairs.TINY)})
    theirs, own = pairs.throughput("cpu", 300.0, "GPT-2", pairs.TRAININGS[:2])
    assert theirs["ratio"] == 1.0
    assert own["tokens/s"] > 0
    assert own["loss"] == pytest.approx(theirs["loss"], rel=1e-2)


@pytest.mark.slow
def test_a_training_without_time_is_told_and_the_next_one_tried(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = gpu.gpu_pairs
    monkeypatch.setattr(pairs, "FULL", {"GPT-2": ("gpt2", pairs.TINY)})
    found = list(pairs.throughput("cpu", 0.0, "GPT-2", pairs.TRAININGS[:2]))
    assert [row["trainer"] for row in found] == ["transformers", "merak"]
    assert all("stopped after" in row["failed"] for row in found)


def test_operators_are_counted_and_attention_is_known(folder_of_scripts: None) -> None:
    traces = importlib.import_module("tools.gpu_trace")
    x = torch.randn(1, 2, 4, 8)
    profiler = traces.starting("cpu")
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    profiler.stop()
    assert traces.counted(profiler).operators > 0
    assert traces.counted(profiler).kernels == 0
    assert traces.attention_of(profiler) == "flash 1"
    assert traces.attention_kernels(["void flash_fwd_kernel<A, B>(C)", "void gemm<X>(Y)"]) == (
        "flash_fwd_kernel"
    )


def test_a_training_that_fails_is_told_in_one_line(gpu: ModuleType) -> None:
    error = ValueError("first\nsecond")
    assert gpu.gpu_pairs.error_text("merak", error) == "merak: ValueError: first"


@pytest.mark.parametrize(
    ("memory_bytes", "layers", "batch"), [(85e9, 48, 4), (60e9, 48, 2), (16e9, 12, 1)]
)
def test_models_are_as_large_as_a_training_fits(
    cases: ModuleType, memory_bytes: float, layers: int, batch: int
) -> None:
    architecture, size = cases.FULL["GPT-2 1.5B"]
    found = cases.fitted(architecture, size, memory_bytes)
    assert (found.layers, found.batch) == (layers, batch)
    assert cases.needed_bytes(architecture, found) < memory_bytes


@pytest.mark.parametrize(
    ("name", "low", "high"), [("GPT-2 1.5B", 1.5e9, 1.6e9), ("Llama 1B", 1.0e9, 1.3e9)]
)
def test_models_are_of_the_sizes_that_their_names_say(
    cases: ModuleType, name: str, low: float, high: float
) -> None:
    architecture, size = cases.FULL[name]
    assert low < cases.num_parameters(architecture, size) < high
    products = 12 * size.layers * size.hidden * size.sequence
    per_token = cases.flops_per_token(architecture, size)
    assert 6 * low - products < per_token - products < 6 * high


@pytest.mark.parametrize(
    ("device", "sheet"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA Something", None),
    ],
)
def test_a_device_has_the_data_sheet_of_its_name(
    cases: ModuleType, device: str, sheet: str | None
) -> None:
    assert cases.sheet_of(device) == sheet


def ended(
    forked: ModuleType, folder: Path, rows: Any, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """A part that has been run alone."""
    part = forked.Part(rows, **{"needs_s": 1.0, "limit_s": 60.0, **options})
    (found,) = forked.run_all({"some": part}, ["some"], device, time.perf_counter() + 60, folder)
    return dict(found)


def test_a_part_that_fails_keeps_its_rows(forked: ModuleType, tmp_path: Path) -> None:
    def some(device: str, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
        yield {"figure": 1}
        raise RuntimeError("no more")

    found = ended(forked, tmp_path, some)
    assert (found["rows"], found["failed"]) == ([{"figure": 1}], "some: RuntimeError: no more")
    (line,) = (tmp_path / "parts.jsonl").read_text().splitlines()
    assert json.loads(line) == found


def test_a_part_is_ended_with_what_it_started_and_its_ranks_say_where_they_stood(
    forked: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forked, "DUMP_AFTER_S", 0.2)

    def hangs(device: str, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
        assert limit_s == 2.0
        child = subprocess.Popen(["sleep", "600"])
        yield {"child": child.pid, "rank": os.environ["RANK"], "host": os.environ["NCCL_HOSTID"]}
        child.wait()

    found = ended(forked, tmp_path, hangs, "cuda", limit_s=2.0, ranks=2)
    (row,) = found["rows"]  # rank 0's alone
    assert found["failed"] == "stopped after 2 s" and (row["rank"], row["host"]) == ("0", "0")
    state = Path(f"/proc/{row['child']}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert all("in hangs" in (tmp_path / f"some.{rank}.log").read_text() for rank in range(2))


def test_parts_without_time_are_left_out_by_name(forked: ModuleType, tmp_path: Path) -> None:
    def never(device: str, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
        yield {}

    found = ended(forked, tmp_path, never, needs_s=90.0)
    assert found["failed"].startswith("left out: it needs 90 s, ")
    on_gpus = forked.Part(never, 1.0, 1.0, needs_gpu=True)
    assert not list(forked.run_all({"gpu": on_gpus}, ["gpu"], "cpu", math.inf, tmp_path))


def test_what_may_run_on_a_gpu_fits_its_time(folder_of_scripts: None) -> None:
    """With what the parts need, the most important ones come first, and none forks CUDA."""
    for name, most_s in (("gpu", 400.0), ("gpu_first", 200.0)):
        script = importlib.import_module(name)
        assert most_s == script.BUDGET_S
        assert all(part.needs_s <= part.limit_s <= most_s / 2 for part in script.PARTS.values())
        compiled = set(getattr(script, "COMPILED_PARTS", ()))
        for at_once in (compiled, script.PARTS.keys() - compiled):
            assert sum(script.PARTS[part].needs_s for part in at_once) < most_s
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_what_is_not_run_again_is_kept(gpu: ModuleType, tmp_path: Path) -> None:
    with_others = gpu.gpu_page.with_others
    file = tmp_path / "device.json"
    assert with_others(file, [{"name": "memory", "rows": [1]}]) == [{"name": "memory", "rows": [1]}]
    earlier = [{"name": "memory"}, {"name": "profile", "rows": [3]}, {"name": "llama", "rows": [4]}]
    file.write_text(json.dumps({"date": "2000-01-01", "parts": earlier}))
    left_out = {"name": "llama", "rows": [], "failed": "left out"}
    assert with_others(file, [{"name": "memory", "rows": [2]}, left_out]) == [
        {"date": "2000-01-01", "name": "profile", "rows": [3]},
        {"name": "memory", "rows": [2]},
        {"date": "2000-01-01", "name": "llama", "rows": [4]},
    ]
    assert set(gpu.PARTS) <= set(gpu.gpu_page.ORDER)


def test_the_page_shows_every_device(gpu: ModuleType) -> None:
    page = gpu.gpu_page
    one = {
        "machine": {"device": "Some GPU", "driver": "1.2", "missing": ""},
        "date": "2000-01-01",
        "parts": [
            {
                "title": "Speeds",
                "date": "1999-12-31",
                "failed": None,
                "rows": [{"figure": "a|b", "value": 1234.5}, {"failed": "out of memory"}],
            }
        ],
    }
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    shown = page.page_with(text, [one])
    assert shown.startswith("before\n") and shown.endswith("after\n")
    assert "### Some GPU" in shown and "| a\\|b | 1,234.5 |" in shown
    assert "- failed: out of memory" in shown and "old" not in shown
    assert "2000-01-01: device" in shown and "Measured 1999-12-31." in shown
    assert page.page_with(shown, [one]) == shown
    assert page.NONE_YET in page.page_with(shown, [])
    with pytest.raises(ValueError, match="lacks the lines"):
        page.page_with("no marks", [])


def test_the_page_of_the_repository_shows_the_files_of_the_repository(gpu: ModuleType) -> None:
    text = gpu.PAGE.read_text("utf-8")
    assert gpu.gpu_page.page_with(text, gpu.gpu_page.load(gpu.FOLDER)) == text

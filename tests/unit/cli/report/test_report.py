"""`merak report` as a user meets it: the page, the figures as JSON, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from merak.cli.main import main
from merak.record.files import RecordWriter
from merak.record.run import RunRecord
from merak.schedule.costs import stage_costs
from merak.schedule.registry import build
from tests.unit.record.runs import job_of, log_of, small_run, step_of

MB = 1_000_000

BROWSER = next((p for p in map(shutil.which, ("chromium", "google-chrome")) if p), None)
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reader of a page that checks that its elements close, and keeps what tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def written(folder: Path, run: RunRecord) -> Path:
    writer = RecordWriter(folder, run.job, goes_on=False)
    for log in run.logs:
        writer.add_log(log)
    if run.steps:
        writer.write_steps(run.steps)
    return folder


def read(path: Path) -> tuple[Page, str]:
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page, text


def test_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(written(tmp_path, small_run()))]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"the page is in {tmp_path / '_merak' / 'report.html'}"
    page, text = read(tmp_path / "_merak" / "report.html")
    assert page.headings == [
        "What to try", "What runs where", "A step", "Loss and throughput",
        "Memory of every pp rank",
    ]  # fmt: skip
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    # Nothing is loaded: no script, no address, no file.
    links = re.findall(r'(?:src|href)=|url\(|@import|<script|https?://[^"\s]+', text)
    assert set(links) == {"http://www.w3.org/2000/svg"}


def test_what_processes_have_grown_by_is_of_each_pp_rank(tmp_path: Path) -> None:
    """Rank 0 may have held more from the start, of data that it prepared."""
    run = small_run()
    job = replace(run.job, on_gpu=False, device_bytes=None, base_bytes=(700 * MB, 400 * MB))
    log = replace(run.logs[0], memory_bytes=(900 * MB, 600 * MB))
    folder = written(tmp_path, replace(run, job=job, logs=(log,)))
    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    page, _ = read(tmp_path / "page.html")
    assert " ".join(page.text).count("measured 200.0 MB") == 2


def test_what_the_page_shows(tmp_path: Path) -> None:
    run = small_run()
    main(["report", str(written(tmp_path, run)), "--output", str(tmp_path / "page.html")])
    page, text = read(tmp_path / "page.html")
    boxes = [value for tag, name, value in page.attributes if (tag, name) == ("rect", "class")]
    actions = sum(map(len, run.steps[0].records))
    idle = text.count("<title>idle, ")
    assert len(boxes) == 2 * actions + idle and idle > 0
    assert sum("critical" in value for value in boxes) > 4
    shown = " ".join(page.text)
    for part in ("1f1b, measured", "1f1b, simulated", "pp rank 0", "pp rank 1", "10,020"):
        assert part in shown
    # The picture has a strip for every segment and a square for every rank.
    assert text.count('title="segment ') == 6
    assert [int(n) for n in re.findall(r"<b>(\d)</b>", text)] == [0, 1, 2, 3]


def test_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(written(tmp_path, small_run())), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "run", "page", "model", "degrees", "step", "loss", "step_seconds", "tokens_per_second",
        "mfu", "bubble", "expected_step_seconds", "ranks", "critical_path", "advice",
    }  # fmt: skip
    assert (report["step"], report["step_seconds"], report["mfu"]) == (30, 0.5, 0.41)
    assert [rank["forecast_bytes"] for rank in report["ranks"]] == [50_000_000_000] * 2
    for rank in report["ranks"]:
        assert rank["busy"] + sum(rank["idle"].values()) == pytest.approx(1, abs=1e-3)
    assert report["critical_path"][0] == "0F0" and report["critical_path"][-1] == "0B3"
    assert all(set(own) == {"what", "do", "gain"} for own in report["advice"])


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(small_run(), logs=(), steps=())
    assert main(["report", str(written(tmp_path, run)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loss"] is None and report["ranks"][0]["busy"] is None
    page, _ = read(tmp_path / "_merak" / "report.html")
    shown = " ".join(page.text)
    assert "No step was measured" in shown and "Nothing was logged yet" in shown


def test_names_are_escaped(tmp_path: Path) -> None:
    run = small_run()
    job = replace(run.job, model="A<b>&Model", device='"quoted" <i>')
    main(["report", str(written(tmp_path, replace(run, job=job)))])
    page, text = read(tmp_path / "_merak" / "report.html")
    assert "A<b>" not in text and "A<b>&Model: dp 2 × tp 1 × pp 2 on 4 ranks" in page.text


def test_a_long_pipeline_with_many_microbatches(tmp_path: Path) -> None:
    schedule = build("1f1b", 16, 256)
    step = step_of(schedule, stage_costs((0.01,) * 16, (0.02,) * 16))
    job = job_of(schedule, (8,) * 16, degrees={"dp": 16, "tp": 8, "pp": 16, "cp": 1, "ep": 1})
    run = RunRecord(job, tuple(log_of(s, 16, mfu=0.4) for s in range(10, 40_000, 10)), (step,))
    main(["report", str(written(tmp_path, run))])
    page, text = read(tmp_path / "_merak" / "report.html")
    assert "The first " in " ".join(page.text)
    assert len(text) < 4_000_000
    assert "ranks 0–127 (16 × 8; rows: dp, columns: tp)" in " ".join(page.text)


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"merak: {tmp_path} is not the folder of a run")
    run = written(tmp_path / "run", small_run())
    assert main(["report", str(run), "--output", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    path = run / "_merak" / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    assert main(["report", str(run)]) == 2
    assert "has version 9 of the record" in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here to open the page with")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_lays_it_out_within_its_window(tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    main(["report", str(written(tmp_path, small_run())), "--output", str(tmp_path / "page.html")])
    page = tmp_path / "page.html"
    probe = (
        "<script>addEventListener('load',()=>{const d=document.documentElement;"
        "document.title=`${d.scrollWidth<=d.clientWidth} ${document.querySelectorAll('h2').length} "
        "${performance.getEntriesByType('resource').length}`})</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", probe))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>([^<]*)</title>", done.stdout)
    assert title is not None and title[1] == "true 5 0"  # no scrolling sideways, nothing loaded

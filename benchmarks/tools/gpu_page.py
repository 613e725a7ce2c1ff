"""Figures of devices as tables of the benchmarks page, one section for each device."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tools import report
from tools.forked import failures

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
FOLDER = ROOT / "docs" / "gpu"

FIRST = ("nccl", "precisions", "trainers")
"""Parts that `gpu_first.py` records."""

ORDER = (
    *FIRST,
    *(
        "profile",
        "attention",
        "launches",
        "memory",
        "llama",
        "gpt2",
        "llama8b",
        "documents",
        "compiled",
        "chunked",
        "float8",
    ),
    *("offload", "optimizer", "rehearsal"),
)
"""The order of all parts on the page."""

BEGIN = "<!-- make gpu writes what follows, from the files in docs/gpu -->"
END = "<!-- until here -->"
NONE_YET = "No figures have been recorded yet: nobody has run this on a GPU."


def page_with(page: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The page with the figures of all devices between its two marks.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}; put them in.")
    text = "\n".join(section(one) for one in found) if found else f"{NONE_YET}\n"
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def load(folder: Path) -> list[dict[str, Any]]:
    """What has been recorded, by the name of the device."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]


def section(found: Mapping[str, Any]) -> str:
    """One device's machine and tables."""
    machine = found["machine"]
    told = ", ".join(f"{key} {text(value)}" for key, value in machine.items() if value)
    lines = [f"### {machine['device']}", "", f"{found['date']}: {told}.", ""]
    for part in found["parts"]:
        lines += [f"#### {part['title']}", ""]
        earlier = part.get("date", found["date"])
        lines += [f"Measured {earlier}.", ""] if earlier != found["date"] else []
        lines += [*table(part["rows"]), ""] if part["rows"] else []
        lines += [f"- failed: {escaped(reason)}" for reason in failures(part)]
        lines += [""] if failures(part) else []
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as a Markdown table; those that failed are told apart from it."""
    good = [row for row in rows if not row.get("failed")]
    heads = list(dict.fromkeys(head for row in good for head in row))
    if not heads:
        return []
    lines = [heads, ["---"] * len(heads)]
    lines += [[escaped(text(row.get(head, ""))) for head in heads] for row in good]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def escaped(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


# ---- what is recorded ----


def record(found: Mapping[str, Any], folder: Path, page: Path | None) -> None:
    """Write figures to a device's file, beside those of other parts, and to the page."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(found["machine"]["device"])
    write(file, {**found, "parts": with_others(file, found["parts"])})
    if page is not None:
        page.write_text(page_with(page.read_text("utf-8"), load(folder)), encoding="utf-8")


def write(file: Path, found: Any) -> None:
    """Write JSON, so that the file is the old or the new one at any time."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draft.replace(file)


def machine_of(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    found = report.machine()
    if device == "cpu":
        return {"device": f"CPU: {found['cpu']}", **found}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "devices here": torch.cuda.device_count(),
        "memory, GB": round(properties.total_memory / 1e9, 1),
        "driver": driver_version(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "torch": found["torch"],
        "transformers": found["transformers"],
        "Python": found["python"],
        "processor": found["cpu"],
        "cores": found["cores"],
        "commit": commit(),
    }


def driver_version() -> str:
    """The driver's version as its own tool tells it; nothing where that is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return output_of(command).partition("\n")[0]


def commit() -> str:
    """The commit that was measured, with a sign where files have been changed since."""
    return output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])


def output_of(command: list[str]) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return ran.stdout.strip()
    return ""


def file_name(device_name: str) -> str:
    """A device's name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def with_others(file: Path, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Parts that have just been run, and those of an earlier run that found no rows now, in order.

    Those of an earlier run have its date.
    """
    before = json.loads(file.read_text("utf-8")) if file.exists() else {"parts": []}
    every = {part["name"]: {"date": before.get("date"), **part} for part in before["parts"]}
    every |= {p["name"]: dict(p) for p in parts if p["rows"] or p["name"] not in every}
    return [every[name] for name in ORDER if name in every]

"""Architectures that train with right gradients: Merak beside what users would pick otherwise.

Every framework trains one step of small versions of many architectures on two ranks, as unmodified
as it takes them, and every parameter's gradient is compared with one process. A family is right
where all gradients agree to 0.1 % of their largest number; all are float32. Frameworks that are
not in Merak's environment run in their own: `--python deepspeed_autotp=/path/to/python`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools import report
from tools.families import FAMILIES

FOLDER = Path(__file__).parent
RANKS = 2
TOLERANCE = 1e-3
FRAMEWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "merak-pp2": ("merak_job", {"DEGREES": '{"pp": 2}'}),
    "merak-tp2": ("merak_job", {"DEGREES": '{"tp": 2}'}),
    "torch-pipeline": ("torch_splitter", {}),
    "transformers-tp": ("transformers_tp", {}),
    "deepspeed-autotp": ("deepspeed_autotp", {}),
    "deepspeed-preset": ("deepspeed_autotp", {"PRESET": "yes"}),
    "fsdp2": ("fsdp", {}),
}
"""What the table calls it → its file in `benchmarks/rivals`, and its environment variables."""
OF_PEERS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a rank says whose peer has failed."""


def answers(framework: str, python: str, names: list[str], limit_s: float) -> dict[str, Any]:
    """What all ranks say of every family; families that end their ranks get fresh ones."""
    found: dict[str, list[dict[str, Any]]] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            said = run(framework, python, folder, left, limit_s)
            for line in lines_of(folder):
                found.setdefault(line["family"], []).append(line)
        reached = [name for name in left if name in found]
        if not reached:  # not one line: it does not start, or hangs in the first family
            found[left[0]] = [{"error": said, "where": "step"}]
            reached = left[:1]
        left = left[len(reached) :]
    return found


def run(framework: str, python: str, folder: str, names: list[str], limit_s: float) -> str:
    """Start the ranks and wait for them; the last line that one of them has printed."""
    script, variables = FRAMEWORKS[framework]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | variables | {
        "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{FOLDER}:{FOLDER.parent / 'src'}",
    }  # fmt: skip
    command = [python, str(FOLDER / "rivals" / f"{script}.py"), folder, *names]
    logs = [Path(folder, f"log{rank}") for rank in range(RANKS)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("wb") as output:
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    said = ""
    try:
        for process in ranks:
            process.wait(limit_s)
    except subprocess.TimeoutExpired:
        said = f"no answer in {limit_s:.0f} s"
    for process in ranks:
        process.kill()
        process.wait()
    printed = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return said or (printed[-1] if printed else "nothing was printed")


def lines_of(folder: str) -> list[dict[str, Any]]:
    """The answers of all ranks."""
    files = sorted(Path(folder).glob("rank*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def verdict(ranks: list[dict[str, Any]]) -> str:
    """Say "right", or what is wrong in a few words."""
    errors = [rank["error"] for rank in ranks if "error" in rank]
    if errors:
        own = [text for text in errors if not any(peer in text for peer in OF_PEERS)]
        return f"fails: {(own or errors)[0]}"
    worst: dict[str, float] = {}
    for rank in ranks:
        for name, value in rank["differences"].items():
            worst[name] = max(worst.get(name, 0.0), value)
    missing = [names[0] for names in ranks[0]["parameters"] if not worst.keys() & set(names)]
    wrong = sorted(name for name, value in worst.items() if not value <= TOLERANCE)
    if missing:
        return f"{len(missing)} parameters without a gradient, {missing[0]} among them"
    if wrong:
        name = max(wrong, key=worst.__getitem__)
        return f"wrong: {len(wrong)} of {len(worst)} gradients, {name} by {worst[name]:.0%}"
    return "right"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--frameworks", nargs="+", choices=list(FRAMEWORKS), default=None)
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="FILE=PYTHON", help="of benchmarks/rivals"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds of one set of ranks")
    options = parser.parse_args()
    pythons = dict(given.split("=", 1) for given in options.python)
    rows = []
    for framework in options.frameworks or FRAMEWORKS:
        python = pythons.get(FRAMEWORKS[framework][0], sys.executable)
        found = answers(framework, python, options.families, options.limit)
        verdicts = {name: verdict(found[name]) for name in options.families}
        right = sum(text == "right" for text in verdicts.values())
        rows.append({"framework": framework, "right": f"{right} of {len(verdicts)}"})
        for name, text in verdicts.items():
            print(f"{framework}, {name}: {text}", file=sys.stderr, flush=True)
    report.show({"Architectures that train with right gradients": rows}, options.json)


if __name__ == "__main__":
    main()

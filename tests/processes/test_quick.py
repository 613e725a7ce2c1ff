"""Commands whose Pythons are forked from one that has imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import multiprocessing as mp, os, subprocess, sys
from dataclasses import dataclass

@dataclass
class Found:
    loaded: bool

def work(line):
    line.send(Found("torch" in sys.modules))

if __name__ == "__main__":
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=work, args=(theirs,))
    process.start()
    assert ours.recv() == Found(True)
    process.join()
    code = "import sys; print(sys.argv, 'torch' in sys.modules); sys.exit(5)"
    done = subprocess.run([sys.executable, "-c", code, "a b"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "['-c', 'a b'] True\\n"), done
    print("reached", sys.argv[1:], flush=True)
    sys.exit(sys.argv[1] == "fails")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Pythons are forked on Linux alone")
def test_commands_and_what_they_start_are_forked(tmp_path: Path) -> None:
    """Scripts, what they spawn, -c and -m behave as in a Python of their own."""
    script, commands = tmp_path / "script.py", tmp_path / "commands"
    script.write_text(SCRIPT, encoding="utf-8")
    lines = [
        f"python {script} works",
        f"torchrun --nproc-per-node 1 {script} fails",
        "merak --help",
    ]
    commands.write_text("# commands\n" + "\n".join(lines), encoding="utf-8")
    quick = [sys.executable, str(ROOT / "benchmarks" / "tools" / "quick.py"), str(commands)]
    done = subprocess.run(quick, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    first, second, third, *_ = [line for line in done.stdout.splitlines() if " s  " in line]
    assert "reached ['works']" not in done.stdout  # shown where a command fails
    assert "reached ['fails']" in done.stdout and f"ended with 1: {lines[1]}" in done.stdout
    assert first.endswith("works") and second.endswith("fails") and third.endswith("--help")

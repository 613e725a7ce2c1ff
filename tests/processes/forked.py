"""Python programs, each in a process of its own: forked from one that has imported torch."""

from __future__ import annotations

import atexit
import functools
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
LIMIT_S = 600.0

SERVER = """
import json, os, sys
import torch, torch.distributed
from merak.core import errors
from merak.core.health import failure, preemption
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()
for number, name in enumerate(("/dev/null", asked["out"], asked["error"])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.environ.clear()
os.environ.update(asked["environment"])
exec(compile(open(asked["script"]).read(), asked["script"], "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env={"PYTHONPATH": str(SOURCE)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.kill)
    return server


def run_script(script: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script as a Python of its own does, from its first line to how it ends."""
    server, folder = _server(), Path(tempfile.mkdtemp())
    out, error = folder / "out", folder / "error"
    for file in (out, error):
        file.touch()
    asked = {"script": str(script), "out": str(out), "error": str(error)}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps({**asked, "environment": dict(environment)}) + "\n")
    server.stdin.flush()
    assert select.select([server.stdout], [], [], LIMIT_S)[0], "it does not end"
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess([str(script)], code, out.read_text(), error.read_text())

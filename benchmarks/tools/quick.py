"""Commands of a file, such as .ci/benchmarks, whose Pythons are forked from one that has imported.

    python benchmarks/tools/quick.py .ci/benchmarks

In their quick forms benchmarks would spend most of their time on importing torch and transformers,
each of them several times: for itself, and for every rank. So would examples. Here one process
imports once and never computes. `python`, `torchrun` and `merak` on the path of the commands, and
`sys.executable` in what they start, are a small program that asks this process for a fork, and
hands it its arguments, environment, folder and open files. What is killed takes its fork along.
Where an environment is one that imports depend on, or the network is another, the small program
becomes the real Python instead. So it is wherever the system is not Linux.

Two commands run at a time, or as many as the second argument says. What a command prints is shown
if it fails. A line `# SCRIPT: reason` names a script that is left out.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing.spawn
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
AT_A_TIME = 2
IMPORTED = ("torch._dynamo", "torch.distributed.run", "transformers", "merak.engine.build",
            "merak.trainer.trainer", "merak.parallel", "merak.zoo.check_by_name")  # fmt: skip
OF_IMPORTS = ("HF_HOME", "OMP_NUM_THREADS", "RUN_SLOW", "CUDA_VISIBLE_DEVICES")
"""Variables that are read while modules are imported."""

PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "merak": ("-m", "merak"),
}
"""Programs that are forked, each by the first arguments of its Python."""

CLIENT = """#!{python} -IS
import array, json, os, socket, sys
own = {{name: os.environ.get(name) for name in {of_imports}}}
words = [*{first}, *sys.argv[1:]]
if own != {values} or os.stat("/proc/self/ns/net").st_ino != {network}:
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
numbers = [int(name) for name in os.listdir("/proc/self/fd")]
numbers = [n for n in numbers if n != server.fileno() and os.path.exists(f"/proc/self/fd/{{n}}")]
program = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python")
asked = {{"arguments": words, "folder": os.getcwd(), "environment": dict(os.environ),
          "numbers": numbers, "program": program}}
words = json.dumps(asked).encode()
socket.send_fds(server, [len(words).to_bytes(8, "big")], numbers)
server.sendall(words)
answer = server.recv(8)
status = int.from_bytes(answer, "big", signed=True) if answer else -9
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""The small program."""


# ---- the process that has imported ----


def serve(listening: socket.socket) -> dict[str, Any]:
    """Fork for whoever asks, until killed. Returns in a fork alone, with what it is to run."""
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    while True:
        for key, _ in waiting.select(0.02):
            if key.fileobj is listening:
                client, _ = listening.accept()
                asked, files = received(client)
                child = os.fork()
                if not child:
                    waiting.close()
                    take_over(asked, files, [listening, client, *children.values()])
                    return asked
                for file in files:
                    os.close(file)
                children[child] = client
                waiting.register(client, selectors.EVENT_READ, child)
            else:  # it has ended, so its fork does
                waiting.unregister(key.fileobj)
                with suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            client = children.pop(child)
            with suppress(OSError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            with suppress(KeyError):
                waiting.unregister(client)
            client.close()


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a client asks for, and its open files."""
    head, files, _, _ = socket.recv_fds(client, 8, 250)
    words = b""
    while len(words) < int.from_bytes(head, "big"):
        words += client.recv(2**16)
    return json.loads(words), files


def take_over(asked: dict[str, Any], files: Sequence[int], others: Sequence[socket.socket]) -> None:
    """Make this fork what the client is: its open files, folder and environment."""
    for other in others:
        other.close()
    above = max([*asked["numbers"], *files], default=2) + 1
    moved = [os.dup2(file, above + place) for place, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(moved, asked["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])


def run_as_python(arguments: list[str]) -> None:
    """Run what these arguments of Python name, in this process."""
    while arguments and arguments[0] in ("-u", "-I", "-B"):
        del arguments[0]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    kind, *words = arguments
    main = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as multiprocessing names it
    if kind == "-m":
        sys.argv = words
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.argv, code, file = ["-c", *words[1:]], words[0], "<string>"
        sys.path.insert(0, "")
    else:
        sys.argv, code, file = arguments, Path(kind).read_text(encoding="utf-8"), kind
        sys.path.insert(0, str(Path(kind).resolve().parent))
        main.__file__ = kind
    exec(compile(code, file, "exec"), vars(main))


# ---- the commands ----


@contextmanager
def forking_python() -> Iterator[None]:
    """Make `python` on this process's path one that forks, for as long as the context lasts."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0merak-quick-{os.getpid()}")
    listening.listen(64)
    server = os.fork()
    if not server:
        with suppress(KeyboardInterrupt):
            run_fork(listening)
    texts = {
        name: CLIENT.format(
            python=sys.executable,
            of_imports=OF_IMPORTS,
            values={name: os.environ.get(name) for name in OF_IMPORTS},
            network=os.stat("/proc/self/ns/net").st_ino,
            address=listening.getsockname(),
            first=first,
        )
        for name, first in PROGRAMS.items()
    }
    listening.close()
    try:
        with tempfile.TemporaryDirectory(prefix="merak-quick-") as folder:
            for name, text in texts.items():
                program = Path(folder, name)
                program.write_text(text, encoding="utf-8")
                program.chmod(0o755)
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
            yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def run_fork(listening: socket.socket) -> None:
    """Serve; and in each fork run what was asked for and end as Python would."""
    path = list(sys.path)
    for name in IMPORTED:
        importlib.import_module(name)
    sys.path[:] = path[1:]  # without this script's folder
    asked = serve(listening)
    sys.executable = asked["program"]
    multiprocessing.spawn.set_executable(sys.executable)
    status = 0
    try:
        run_as_python(asked["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # not back to what this process was forked from


def run(command: str) -> tuple[str, float, subprocess.CompletedProcess[bytes]]:
    """Run one command, of which a hang is a failure."""
    started = time.perf_counter()
    limited = ["timeout", "--kill-after=5", str(LIMIT_S), "bash", "-c", command]
    done = subprocess.run(
        limited, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return command, time.perf_counter() - started, done


def main() -> None:
    """Run all commands of the file that is named; ends with 1 if one of them failed."""
    file, *number = sys.argv[1:]
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    failed = 0
    at_a_time = int(number[0]) if number else AT_A_TIME
    forking = forking_python() if sys.platform == "linux" else nullcontext()
    with forking, ThreadPoolExecutor(at_a_time) as pool:
        for command, seconds, done in pool.map(run, commands):
            print(f"{seconds:5.1f} s  {command}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stdout.decode(errors="replace"))
                print(f"ended with {done.returncode}: {command}", flush=True)
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()

"""Settings of every test: one thread a process, no network, GPU tests where there is a GPU.

Tests marked `soak` run for hours, so only `-m soak` runs them.
"""

import atexit
import faulthandler
import logging
import os
import shutil
import tempfile
from collections.abc import Generator
from typing import NoReturn

# Before torch is imported, here or in a rank that a test starts. Several ranks share the cores of
# one machine, and sums split over threads would depend on how many there are.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

# Traces of one run, of whichever of its processes; `tests/shared_cache.py`.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MERAK_CACHE"] = tempfile.mkdtemp(prefix="merak-traces-")
    atexit.register(shutil.rmtree, os.environ["MERAK_CACHE"], ignore_errors=True)

import pytest
from hypothesis import HealthCheck, settings

from tests import causes, garbage
from tests.mutations.mutation import apply_named

# How long examples take says how busy the machine is.
settings.register_profile("merak", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("merak")


def pytest_configure() -> None:
    """Let a process of tests that ends itself say where: what it has printed is lost with it."""
    apply_named()
    causes.count()
    own, leave, stderr = os.getpid(), os._exit, os.dup(2)

    def say_and_leave(status: int) -> NoReturn:
        if os.getpid() == own:  # and not a process forked from it
            os.write(stderr, f"\na process of tests ends itself, with status {status}:\n".encode())
            faulthandler.dump_traceback(stderr)
        leave(status)

    os._exit = say_and_leave


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without a CUDA device, and `soak` unless asked."""
    if "soak" not in config.option.markexpr:
        soaking = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaking)
        items[:] = [item for item in items if item not in soaking]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what has been imported out of all collections of garbage, and torch's traces unheard.

    Torch describes every graph it traces, with its operators, to whoever listens to this logger:
    pytest does with one that does not propagate.
    """
    logging.getLogger("torch.__trace").propagate = True
    garbage.leave_out()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Collect a file's garbage behind its last test, and leave out what stays."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        garbage.leave_out()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a run fail whose tests cause more than the budget of their tier."""
    is_whole = "PYTEST_XDIST_WORKER" not in os.environ
    if is_whole and causes.over_budget(session.config.option.markexpr, causes.counts()):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what the tests of the run have caused."""
    counted = causes.counts()
    if counted:
        terminalreporter.section("causes of time")
        terminalreporter.line(", ".join(f"{n} {cause}" for cause, n in sorted(counted.items())))
    for sentence in causes.largest() if counted else ():
        terminalreporter.line(sentence)
    for sentence in causes.over_budget(config.option.markexpr, counted):
        terminalreporter.line(sentence, red=True)

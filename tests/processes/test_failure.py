from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from merak.core.errors import MeshError
from merak.core.health import failure
from tests.processes.forked import SOURCE, run_script


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    imports = "from merak.core import errors; from merak.core.health import failure"
    script.write_text(f"{imports}\nfailure.install()\n{code}\n")
    return run_script(script, {"PYTHONPATH": str(SOURCE), **environment})


def test_a_merak_error_is_a_sentence_and_a_place(tmp_path: Path) -> None:
    done = run(tmp_path, "failure.install()\nraise errors.DataError('no data; give some.')")
    assert done.returncode == 2
    assert done.stderr == f"merak: no data; give some. [{tmp_path}/script.py:4]\n"


def test_another_error_keeps_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raise KeyError('x')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.count("KeyError: 'x'") == 1


def test_the_whole_traceback_on_request(tmp_path: Path) -> None:
    done = run(tmp_path, "raise errors.DataError('no data.')", MERAK_TRACEBACK="1")
    assert "Traceback" in done.stderr
    assert "DataError: no data." in done.stderr


@pytest.mark.parametrize("failed_before", ["", "0"])
def test_the_first_of_several_ranks_speaks(tmp_path: Path, failed_before: str) -> None:
    code = f"""
import torch.distributed as dist
failure.LAUNCHER_S = 0.0
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
if {failed_before!r}:
    dist.distributed_c10d._get_default_store().set(failure.KEY, {failed_before!r})
raise errors.DataError("no data.")
"""
    error_file = tmp_path / "error.json"
    variables = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = run(tmp_path, code, **variables)
    assert done.returncode != 0
    assert done.stderr.count("merak: no data.") == (0 if failed_before else 1)
    assert error_file.exists() is (not failed_before)


def test_a_peer_that_has_ended_is_told_from_an_error_of_ones_own() -> None:
    assert failure.is_lost_connection(dist.DistBackendError("anything"))
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:  # not raised inside Merak or torch.distributed
        assert not failure.is_lost_connection(error)
    assert not failure.is_lost_connection(ValueError("connection"))


def test_a_sentence_names_the_users_line() -> None:
    with pytest.raises(MeshError) as caught:
        raise MeshError("wrong.")
    assert failure.sentence_of(caught.value).startswith("merak: wrong. [")
    assert "test_failure.py:" in failure.sentence_of(caught.value)
    assert failure.sentence_of(MeshError("nowhere.")) == "merak: nowhere."


def test_before_ranks_join_a_failure_of_an_earlier_attempt_does_not_count() -> None:
    store = dist.HashStore()
    started = failure._start_s()
    assert 0 < time.time() - started < 10 * 3600
    store.set(failure.EARLY_KEY, f"{started - 1.0} 0")
    assert failure._is_first_of_start(store, "1")
    assert failure._is_first_of_start(store, "1")
    assert not failure._is_first_of_start(store, "0")


@pytest.mark.parametrize(("name", "code"), [("the script's", 0), ("merak something", 1)])
def test_a_thread_of_meraks_own_ends_the_process(tmp_path: Path, name: str, code: int) -> None:
    lines = f"""
import threading
thread = threading.Thread(target=lambda: 1 / 0, name={name!r})
thread.start()
thread.join()
"""
    done = run(tmp_path, lines)
    assert done.returncode == code
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [("errors.DataError('no data.')", 2), ("errors.TrainingError('NaN.')", 1), ("KeyError()", 1)],
)
def test_a_rank_ends_with_the_code_of_its_error_though_python_cannot_end(
    tmp_path: Path, raised: str, code: int
) -> None:
    """A thread waits for ever, as those of communication libraries do, and no signal is needed."""
    lines = f"""
import threading
failure.EXIT_S = 0.5
threading.Thread(target=threading.Event().wait).start()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise {raised}
"""
    done = run(tmp_path, lines, RANK="1", WORLD_SIZE="2")
    assert done.returncode == code, done.stderr

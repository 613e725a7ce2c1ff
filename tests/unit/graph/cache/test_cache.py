"""Traces on disk: found when equal, made anew when anything changed, whole with many processes."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from merak.core.files import private_files as private
from merak.core.tensor_meta import TensorMeta
from merak.graph.cache import cache
from merak.graph.cache.cache import cached
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model
from merak.graph.segment.build import GraphSource, build_timed
from tests.tiers import one_in
from tests.unit.graph import odd_models
from tests.unit.graph.cache.test_fingerprint import RAISING, raising
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import Pipeline, metas

ROWS = {"x": TensorMeta((4, 8), torch.float32)}


class Scaled(Layers):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) * self.scale)


def loss(output: Tensor, batch: dict[str, Tensor], power: float = 2.0) -> Tensor:
    return output.pow(power).mean()


def other_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.abs().mean()


def enclosed(power: float) -> Any:
    return lambda output, batch: output.pow(power).mean()


def is_known(folder: Path, *, columns: Any = ROWS, training: bool = True, **source: Any) -> bool:
    """Whether a model's trace comes from disk; it is there afterwards."""
    made = {"model": Scaled(), "loss_fn": loss} | source
    return build_timed(GraphSource(**made, cache_dir=folder), columns, training=training).cached


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace."""
    folder = tmp_path_factory.mktemp("stored")
    assert not is_known(folder)
    return folder


@pytest.fixture
def entry(stored: Path, tmp_path: Path) -> Path:
    """The file of that trace, in the folder of a test."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    (found,) = tmp_path.glob("*.graph")
    return found


def test_an_equal_model_is_found(tmp_path: Path) -> None:
    assert not is_known(tmp_path)
    assert is_known(tmp_path)


class Keeping(Scaled):
    """A model that adds to a list in every call, which is warned of where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.means.append(out.detach().mean())
        return out


def test_a_trace_that_is_warned_of_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        assert not is_known(tmp_path, model=Keeping())
        assert caplog.text.count("forward keeps values in model.means") == number


def test_other_weights_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    is_known(tmp_path)
    torch.manual_seed(1)
    assert is_known(tmp_path)


@one_in(3)
@pytest.mark.parametrize(
    "changed",
    [
        {"model": Scaled(2.0)},
        {"columns": {"x": TensorMeta((2, 8), torch.float32)}},
        {"columns": {"x": TensorMeta((4, 8), torch.float64)}, "model": Scaled().double()},
        {"training": False},
        {"loss_fn": other_loss},
        {"loss_fn": functools.partial(loss, power=3.0)},
        {"loss_fn": enclosed(2.0)},
    ],
    ids=["attribute", "shape", "column", "mode", "loss", "partial", "closure"],
)
@pytest.mark.usefixtures("entry")
def test_a_changed_source_is_not_found(tmp_path: Path, changed: dict[str, Any]) -> None:
    source = {"loss_fn": loss} | changed
    assert not is_known(tmp_path, **source)
    assert is_known(tmp_path, **source)


@pytest.mark.usefixtures("entry")
def test_a_version_of_torch_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert not is_known(tmp_path)


def test_what_comes_from_disk_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = odd_models.PlainTensors(), odd_models.rows()
    source = GraphSource(model, cache_dir=tmp_path)
    made, read = (build_timed(source, metas(batch), training=True) for _ in range(2))
    assert (made.cached, read.cached) == (False, True)
    expected = Pipeline(made.graph, model).train(batch)
    assert torch.equal(Pipeline(read.graph, model).train(batch), expected)
    assert str(pack_model(made.graph)) == str(pack_model(read.graph))


def file_of(text: str) -> bytes:
    return save({"values": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})


HEAD = '{"metas": [], "tensors": [], "values": {"sources": {"dict": []}, "graph": '


@pytest.mark.parametrize(
    "content",
    [b"", b"no graph", file_of("{"), file_of('{"values": {}}'), file_of(HEAD + "3}}"),
     file_of(HEAD + '{"dict": [["segments", []], ["parameter_writes", []], '
             '["prologue", [1, 2]]]}}}')],
    ids=["empty", "garbage", "no JSON", "without graph", "number", "half"],
)  # fmt: skip
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path, entry: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    entry.write_bytes(content)
    assert not is_known(tmp_path)
    assert caplog.text.count(f"{entry} cannot be read") == 1
    assert is_known(tmp_path)


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_a_planted_pickle_runs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_dir, ran = tmp_path / "cache", tmp_path / "ran"
    is_known(cache_dir)
    (entry,) = cache_dir.glob("*.graph")
    entry.write_bytes(pickle.dumps({"sources": {}, "graph": Planted(ran)}))
    assert not is_known(cache_dir)
    assert not ran.exists()
    told = [r.getMessage() for r in caplog.records if r.name == cache.__name__]
    assert len(told) == 1 and told[0].endswith("it is made anew.")
    assert is_known(cache_dir)


@pytest.mark.parametrize(
    ("written", "planted"),
    [
        ("torch.ops:aten.relu.default", "os:system"),
        ("torch.ops:aten.relu.default", "posix:system"),
        ("torch.ops:aten.relu.default", "builtins:eval"),
        ("torch.ops:aten.relu.default", "torch:load"),
        ("torch.ops:aten.relu.default", "torch.ops:load_library"),
        ("torch.ops:aten.relu.default", "torch.ops:aten.from_file.default"),
        ("torch.ops:aten.relu.default", "torch.ops:aten.save.default"),
        ("merak.graph.ir.ir:Kind", "subprocess:Popen"),
        ("merak.graph.ir.ir:Kind", "http:HTTPStatus.__class__"),
        ("merak.graph.ir.ir:Segment", "merak.graph.segment.build:GraphSource"),
        ("merak.graph.ir.ir:Segment", "builtins:print"),
    ],
)
def test_a_planted_name_is_never_called(
    tmp_path: Path, entry: Path, written: str, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of functions and classes are looked up among what holds data and computes tensors."""
    text = load(entry.read_bytes())["values"].numpy().tobytes().decode()
    assert f'"{written}"' in text
    entry.write_bytes(file_of(text.replace(f'"{written}"', f'"{planted}"')))
    assert not is_known(tmp_path)
    told = [r.getMessage() for r in caplog.records if r.name == cache.__name__]
    assert len(told) == 1 and told[0].endswith("it is made anew.")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class WithFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Doubled.apply(self.a(x)))  # type: ignore[no-untyped-call]


def test_an_autograd_function_is_found_and_nothing_else_in_its_place(tmp_path: Path) -> None:
    model = WithFunction()
    assert not is_known(tmp_path, model=model)
    assert is_known(tmp_path, model=model)
    (entry,) = tmp_path.glob("*.graph")
    text = load(entry.read_bytes())["values"].numpy().tobytes().decode()
    name = f"{__name__}:Doubled"
    assert name in text
    entry.write_bytes(file_of(text.replace(name, "os:system")))
    assert not is_known(tmp_path, model=model)


def test_the_folder_and_its_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    before = os.umask(0)
    try:
        is_known(folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    (entry,) = folder.glob("*.graph")
    assert entry.stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_may_write_is_made_anew(
    tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry.chmod(0o620)
    assert not is_known(tmp_path)
    assert "may be written by other users (mode 620)" in caplog.text
    assert is_known(tmp_path)


def test_a_file_of_another_user_is_made_anew(
    tmp_path: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(entry, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(
        private.os, "getuid", lambda: os.stat(entry).st_uid + 1
    )
    assert not is_known(tmp_path)
    assert "belongs to another user" in caplog.text


def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_job(tmp_path: Path, entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)
    assert not is_known(tmp_path)
    assert is_known(tmp_path)


def test_a_cut_off_entry_is_made_anew(tmp_path: Path, entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-100])
    assert not is_known(tmp_path)
    assert is_known(tmp_path)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == cache.__name__]


def test_a_damaged_entry_is_warned_of_once(
    tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry.write_bytes(b"no graph")
    assert not is_known(tmp_path)  # looked at before it is locked and after
    assert is_known(tmp_path)
    assert len(_told(caplog)) == 1


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(private.os, "replace", fail)
    assert not is_known(tmp_path)
    assert not is_known(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    (told,) = _told(caplog)
    assert f"{tmp_path} cannot be used for traced models (disk full)" in told


def _is_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.write_text("", encoding="utf-8")
    return folder


def _is_inside_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.write_text("", encoding="utf-8")
    return folder / "cache"


def _cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    return folder


def _cannot_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(cache.FileLock, "acquire", refuse)
    return folder


def _is_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder.mkdir()
    monkeypatch.setattr(cache.FileLock, "acquire", refuse)
    return folder


@pytest.mark.parametrize(
    "spoil", [_is_file, _is_inside_a_file, _cannot_be_made, _cannot_lock, _is_read_only]
)
def test_a_folder_of_no_use_is_warned_of_once(
    spoil: Callable[[Path, pytest.MonkeyPatch], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = spoil(tmp_path / "cache", monkeypatch)
    assert not is_known(folder)
    assert not is_known(folder)
    (told,) = _told(caplog)
    assert f"{folder} cannot be used for traced models (" in told


@pytest.mark.usefixtures("entry")
def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _is_read_only(tmp_path / "other", monkeypatch)
    assert is_known(tmp_path)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from helper import act
from merak.graph.segment.build import GraphSource, build_timed
from merak.graph.ir.ir import TensorMeta

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
    def forward(self, x):
        return act(self.a(x)).mean()

source = GraphSource(Model(), cache_dir=Path(sys.argv[1]) / "cache")
columns = {"x": TensorMeta((2, 4), torch.float32)}
print(build_timed(source, columns, training=True).cached)
"""


@pytest.mark.slow
def test_a_changed_file_that_the_model_only_calls(tmp_path: Path) -> None:
    script, helper = tmp_path / "script.py", tmp_path / "helper.py"
    script.write_text(SCRIPT)

    def found() -> bool:
        command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(Path(cache.__file__).parents[3])}
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return "True" in done.stdout

    helper.write_text("import torch\ndef act(x):\n    return torch.relu(x)\n")
    assert [found(), found()] == [False, True]
    helper.write_text("import torch\ndef act(x):\n    return torch.tanh(x) # other\n")
    assert not found()


def _ask(folder: Path, start: Any, results: Any) -> None:
    torch.set_num_threads(1)
    start.wait()
    made: list[int] = []

    def make() -> tuple[ModelGraph, frozenset[str]]:
        made.append(os.getpid())
        empty = GraphSource(odd_models.Mlp())
        return build_timed(empty, ROWS, training=True).graph, frozenset([__file__])

    graph, known = cached(folder, "key", make)
    results.put((len(made), known, len(graph.segments)))


def test_of_many_processes_one_makes_the_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # the imports are done
    start, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_ask, args=(tmp_path, start, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted((count, known) for count, known, _ in answers) == [(0, True)] * 3 + [(1, False)]
    assert {segments for *_, segments in answers} == {3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.graph", "key.lock"]


def test_the_model_comes_whole_from_disk(tmp_path: Path) -> None:
    """A rank's share of the parameters in the model changes neither key nor graph."""
    model: nn.Module = odd_models.Mlp()
    source = GraphSource(model, cache_dir=tmp_path)
    build_timed(source, ROWS, training=True)
    model.a.weight = nn.Parameter(model.a.weight.detach()[:4])
    again = build_timed(source, ROWS, training=True)
    assert again.cached
    assert again.graph.parameters["a.weight"].shape == (8, 8)
    assert model.a.weight.shape == (4, 8)


@one_in(4)
@pytest.mark.parametrize(("method", "bases"), RAISING)
def test_an_object_whose_code_fails_ends_no_trace(
    method: str, bases: tuple[type, ...], tmp_path: Path
) -> None:
    model = Scaled()
    vars(model)["held"] = raising(method, bases)
    assert not is_known(tmp_path, model=model)

"""Checkpoints on an object store, from hosts that share no file system: as those in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import merak
from merak.checkpoint.remote.folder import RemoteFolder
from merak.cli.export import ExportRequest, export_report
from merak.core import mesh
from merak.core.errors import SavingError, WeightsError
from tests import object_store
from tests.multirank.ranks import RankPool
from tests.multirank.test_own_loop_resume import losses
from tests.multirank.test_resume import END, MIDDLE, FirstIsBest, digest, losses_of
from tests.multirank.training import Layout, Setup, make_merak
from tests.object_store import ObjectStore
from tests.tiers import slow

RUN = "store://bucket/run"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv(object_store.ROOT, str(folder))
    return str(folder)


def own_trainer(
    store: str, layout: Layout, cache: str, make: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """A trainer that saves in the store, on a rank whose disk no other rank sees."""
    dp, tp, pp = layout
    os.environ[object_store.ROOT] = store
    mesh.reset()
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    own = f"{store}-rank{torch.distributed.get_rank()}"
    given = {"save_strategy": "steps", "save_steps": MIDDLE, "max_steps": END, **arguments}
    fields = {"output_dir": own, "checkpoint_url": RUN, **given}
    return make_merak(Setup("gpt2", dropout=0.1, arguments=fields), dp, cache, **(make or {}))


def stopped_and_resumed(store: str, layout: Layout, cache: str, arguments: dict[str, Any]) -> Any:
    """Losses and bits of a job, and of one that goes on from its middle; what is left on disk."""
    whole = own_trainer(store, layout, cache, **arguments)
    whole.train()
    later = RUN + f"/checkpoint-{END}"
    if torch.distributed.get_rank() == 0:
        RemoteFolder(later).remove(["manifest.json"])
    torch.distributed.barrier()
    resumed = own_trainer(store, layout, cache, **arguments)
    resumed.train(resume_from_checkpoint=True)
    left = [path.name for path in Path(whole.args.output_dir).iterdir()]
    found = [(losses_of(trainer), digest(trainer)) for trainer in (whole, resumed)]
    return found, sorted(name for name in left if "checkpoint" in name)


@pytest.mark.parametrize(
    ("layout", "arguments"), [((2, 1, 1), {"zero": 1}), slow((1, 1, 2), {"async_save": False})]
)
def test_a_job_goes_on_from_the_store_as_if_it_had_not_stopped(
    pool: RankPool, store: str, cache: str, layout: Layout, arguments: dict[str, Any]
) -> None:
    for (whole, resumed), left in pool.run(stopped_and_resumed, 2, store, layout, cache, arguments):
        assert len(whole[0]) == END
        assert resumed == whole
        assert left == []


def interrupted(store: str, cache: str) -> list[str]:
    """A job whose second checkpoint one rank cannot upload, and one that goes on behind it."""
    trainer = own_trainer(store, (1, 1, 2), cache, save_steps=2)
    told = []
    fails = "checkpoint-4/rank-00001" if trainer.mesh.rank == 1 else ""
    with mock.patch.object(ObjectStore, "fail_on", fails):
        try:
            trainer.train()
        except SavingError as error:
            told.append(str(error))
    resumed = own_trainer(store, (1, 2, 1), cache, max_steps=4, save_strategy="no")
    resumed.train(resume_from_checkpoint="auto")
    return [*told, str(len(losses_of(resumed)))]


def test_an_upload_that_fails_leaves_the_checkpoint_before(
    pool: RankPool, store: str, cache: str
) -> None:
    for told, num_losses in pool.run(interrupted, 2, store, cache):
        assert f"{RUN}/checkpoint-4 could not be written (ConnectionError: no answer" in told
        assert num_losses == "4"
    assert "manifest.json" not in os.listdir(f"{store}/bucket/run/checkpoint-4")


def best_of_run(store: str, cache: str) -> tuple[str, bool, list[str]]:
    """The best checkpoint of a job, whether it ends with its weights, and what is in the store."""
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, **best}
    make = {"trainer_class": FirstIsBest, "eval_dataset": [{"input_ids": [1]}]}
    trainer = own_trainer(store, (1, 1, 2), cache, make=make, save_total_limit=1, **evaluating)
    first: dict[str, torch.Tensor] = {}

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                held = trainer.engine.parameters.items()
                first.update({name: value.detach().clone() for name, value in held})

    trainer.add_callback(Note())
    trainer.train()
    now = trainer.engine.parameters
    is_best = all(torch.equal(now[name], first[name]) for name in first)
    kept = sorted({name.split("/")[0] for name in RemoteFolder(RUN).sizes()})
    return str(trainer.state.best_model_checkpoint), is_best, kept


@pytest.mark.slow
def test_the_best_is_loaded_and_the_newest_kept(pool: RankPool, store: str, cache: str) -> None:
    for best, is_best, kept in pool.run(best_of_run, 2, store, cache):
        assert best == f"{RUN}/checkpoint-2"
        assert is_best
        assert kept == ["checkpoint-2", f"checkpoint-{END}"]


def loop(store: str, *args: Any) -> Any:
    os.environ[object_store.ROOT] = store
    return losses(*args)


def test_a_loop_of_ones_own_goes_on_from_the_store(
    pool: RankPool, store: str, tmp_path: Path
) -> None:
    url = "store://bucket/loop/saved"
    ((whole, _), _) = pool.run(loop, 2, store, (1, 1, 2), range(6), str(tmp_path / "other"))
    ((first, _), _) = pool.run(loop, 2, store, (1, 1, 2), range(3), url)
    ((then, values), _) = pool.run(loop, 2, store, (2, 1, 1), range(3, 6), url)
    assert first + then == pytest.approx(whole, rel=1e-5)
    assert values == {"seen": 3, "rate": 0.1}


def exported(store: str, cache: str) -> None:
    trainer = own_trainer(store, (1, 1, 2), cache, max_steps=2, save_steps=2)
    trainer.train()
    trainer.save_model(f"{store}/../saved")


def test_it_is_exported_from_the_store(
    pool: RankPool, store: str, cache: str, tmp_path: Path
) -> None:
    pool.run(exported, 2, store, cache)
    report = export_report(ExportRequest(checkpoint=f"{RUN}/checkpoint-2", out=tmp_path / "out"))
    assert "model.safetensors" in report.files
    for name in report.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    flip_a_byte(Path(store, "bucket/run/checkpoint-2/model.safetensors"))
    with pytest.raises(
        WeightsError, match=r"checkpoint-2 is damaged \(model.safetensors has another"
    ):
        export_report(ExportRequest(checkpoint=f"{RUN}/checkpoint-2", out=tmp_path / "again"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

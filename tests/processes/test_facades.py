"""Names that packages export for users: each exists, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["merak.schedule", "merak.plan"])
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert len(module.__all__) <= 10
    assert set(module.__all__) == set(module._HOMES)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'missing'"):
        _ = module.missing


def test_no_submodule_hides_an_exported_name() -> None:
    for package in ("merak.schedule", "merak.plan"):
        for name in importlib.import_module(package).__all__:
            with pytest.raises(ImportError):
                importlib.import_module(f"{package}.{name}")


def test_schedules_do_without_torch() -> None:
    code = (
        "import sys, merak.schedule as s; assert 'numpy' not in sys.modules; "
        "[getattr(s, name) for name in s.__all__]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_own_loop_does_without_trainer_and_datasets() -> None:
    code = (
        "import sys, merak; merak.parallelize; import merak.parallel; "
        "print([m for m in ('transformers.trainer', 'datasets', 'pandas') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_training_does_without_datasets_and_pydantic(tmp_path: Path) -> None:
    """As on a machine that has torch, transformers and little else."""
    code = """
        import importlib.util, sys
        absent, find = ("datasets", "pandas", "pyarrow", "pydantic"), importlib.util.find_spec
        sys.modules |= dict.fromkeys(absent)  # importing them fails
        importlib.util.find_spec = lambda name, *rest: (
            None if name.partition(".")[0] in absent else find(name, *rest)
        )
        import merak, torch
        merak.init(device="cpu")
        model = torch.nn.Linear(2, 1)
        model.forward = lambda x: {"loss": torch.nn.Linear.forward(model, x).square().mean()}
        args = merak.MerakArguments(
            output_dir=sys.argv[1], max_steps=1, use_cpu=True, report_to=[], eval_strategy="steps",
            disable_tqdm=True, log_level="error", dataloader_pin_memory=False,
        )
        rows = [{"x": torch.ones(2)}] * 8
        trainer = merak.MerakTrainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_model(sys.argv[1] + "/model")
        print(trainer.state.global_step)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip().endswith("1"), done.stderr

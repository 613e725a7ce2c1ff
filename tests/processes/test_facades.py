"""Names that packages export for users: each exists, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

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

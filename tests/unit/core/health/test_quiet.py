"""Warnings of libraries: needless ones on no rank, others on rank 0 alone."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator

import pytest
import transformers

from merak.cli.main import main
from merak.core.health.quiet import hide_warnings, quiet_libraries, warn_once

NEEDLESS = "`loss_type=None` was set in the config but it is unrecognized. Using the default loss."


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    library = logging.getLogger("transformers")
    level, filters = library.level, list(logging.getLogger("transformers.modeling_utils").filters)
    library.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        yield
    library.setLevel(level)
    logging.getLogger("transformers.modeling_utils").filters[:] = filters


def heard(caplog: pytest.LogCaptureFixture) -> list[str]:
    logger = logging.getLogger("transformers.modeling_utils")
    caplog.clear()
    for message in (NEEDLESS, "a warning", "and"):
        logger.warning(message)
    logger.error("an error")
    return [record.getMessage() for record in caplog.records]


def test_rank_0_warns_of_what_can_be_acted_on(caplog: pytest.LogCaptureFixture) -> None:
    assert transformers.__version__
    quiet_libraries(0)
    quiet_libraries(0)
    assert heard(caplog) == ["a warning", "and", "an error"]


def test_other_ranks_tell_errors_alone(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries(3)
    assert heard(caplog) == ["an error"]


def test_levels_of_the_user_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("transformers").setLevel(logging.INFO)
    quiet_libraries(3)
    assert "a warning" in heard(caplog)
    logging.getLogger("transformers").setLevel(logging.WARNING)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    quiet_libraries(3)
    assert "a warning" in heard(caplog)


def test_python_warnings_of_libraries_come_behind_the_users_filters() -> None:
    def seen(module: str, text: str = "text") -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.warn_explicit(text, FutureWarning, "file.py", 1, module=module)
        return len(found)

    warnings.resetwarnings()
    quiet_libraries(0)
    renamed = "`is_gradient_checkpointing` is deprecated and will be removed"
    assert [seen("transformers.modeling_utils", text) for text in (renamed, "text")] == [0, 1]
    quiet_libraries(3)
    assert [seen(name) for name in ("torch.nn.modules", "transformers", "torchvision", "mine")] == [
        0, 0, 1, 1
    ]  # fmt: skip
    warnings.filterwarnings("always", module="torch")
    assert seen("torch.nn.modules") == 1


def test_a_command_warns_once_and_its_ranks_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    library, logger = logging.getLogger("transformers"), logging.getLogger("transformers.models.x")
    shown = logging.StreamHandler(io.StringIO())
    library.addHandler(shown)
    filters = [(handler, list(handler.filters)) for handler in library.handlers]
    try:
        warn_once()
        for _ in range(2):
            logger.warning("add %s", "is_decoder=True")
            logger.warning("add %s", "labels")
        hide_warnings()
        logger.warning("a warning of a rank")
    finally:
        library.removeHandler(shown)
        for handler, own in filters:
            handler.filters[:] = own
    assert shown.stream.getvalue().splitlines() == ["add is_decoder=True", "add labels"]


def test_commands_show_no_needless_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes"]) == 0
    assert heard(caplog) == ["a warning", "and", "an error"]

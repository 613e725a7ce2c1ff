"""What rank 0 tells before the first step, and who sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from merak.core import announce as module
from merak.core.announce import announce, announced, is_announcing, show_announcements

OWN = logging.getLogger("merak")


@contextmanager
def as_in_a_script() -> Iterator[None]:
    """No handlers, as where nobody has set up logging; pytest has some."""
    root, own, level = logging.root.handlers[:], OWN.handlers[:], module.logger.level
    announced_level = module._shown.announced
    logging.root.handlers[:], OWN.handlers[:] = [], []
    module.logger.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        logging.root.handlers[:], OWN.handlers[:] = root, own
        module.logger.setLevel(level)
        module._shown.announced = announced_level


@as_in_a_script()
def test_nothing_is_shown_unless_somebody_wants_it(capfd: pytest.CaptureFixture[str]) -> None:
    announce("hidden")
    assert not is_announcing()
    assert capfd.readouterr() == ("", "")


@as_in_a_script()
def test_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    show_announcements()
    show_announcements()
    with announced("tracing Net") as details:
        details.append("3 segments")
    OWN.getChild("other").warning("take care")
    OWN.getChild("other").info("too much")
    begin, end, warning = capfd.readouterr().err.splitlines()
    assert begin == "[merak] tracing Net …"
    assert end.startswith("[merak] tracing Net took 0.") and end.endswith(" s, 3 segments")
    assert warning == "[merak] take care"


@as_in_a_script()
def test_other_ranks_are_silent(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    show_announcements()
    announce("twice")
    assert capfd.readouterr().err == ""


@as_in_a_script()
def test_the_users_own_logging_decides(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    show_announcements()
    logging.root.addHandler(handler)  # after the trainer was made
    announce("once")
    assert seen == ["once"]
    assert capfd.readouterr().err == ""


@as_in_a_script()
def test_a_higher_level_hides_them(capfd: pytest.CaptureFixture[str]) -> None:
    show_announcements(logging.WARNING)
    announce("hidden")
    assert capfd.readouterr().err == ""


@as_in_a_script()
def test_work_that_fails_has_not_taken_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    show_announcements()
    with pytest.raises(ValueError), announced("tracing Net"):
        raise ValueError
    assert capfd.readouterr().err == "[merak] tracing Net …\n"

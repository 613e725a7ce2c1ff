"""JSON of files: one meaning or a sentence, whatever is in the file's place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from merak.core.files.json_file import UnreadableFile, parse_json, parse_value, read_json, read_text


def test_a_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, "é"]}
    assert read_json(path, convert=lambda found: sorted(found)) == ["a"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"a": 1}\0', "Extra data"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' is given twice"),
        ("NaN", "NaN is no finite number"),
        ("[-Infinity]", "-Infinity is no finite number"),
        ("1e999", "1e999 is no finite number"),
        ("1" * 5000, "Exceeds the limit"),
        ("[" * 200 + "]" * 200, "more than 100 levels"),
        ("[" * 100_000, "more than 100 levels"),
        ('{"a":' * 100_000, "more than 100 levels"),
        (r'["\u0000"]', "is no text: it has NUL"),
        (r'{"\ud800": 1}', "or half of a character"),
    ],
)
def test_what_is_no_json_of_one_meaning(text: str, why: str) -> None:
    with pytest.raises(UnreadableFile, match=r"^is not JSON \(") as caught:
        parse_json(text)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_what_pythons_own_writer_writes_may_be_read() -> None:
    assert parse_json("[Infinity, -Infinity]", finite=False) == [float("inf"), -float("inf")]
    assert parse_json("[" * 100 + "]" * 100)


def test_values_of_options() -> None:
    assert [parse_value(text) for text in ("2", '"2"', "[1]", "true")] == [2, "2", [1], True]
    for text in ("two", "[1", "[" * 100_000, "1" * 5000, '{"a": 1, "a": 2}'):
        assert parse_value(text) == text


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "text").write_bytes(b'{"a": "\xc3')
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**34)
    for name, why in (
        ("pipe", "cannot be read (it is no regular file)"),
        ("folder", "cannot be read (Is a directory)"),
        ("link", "cannot be read (Too many levels of symbolic links)"),
        ("text", "cannot be read (it is no text: byte 7 is no UTF-8)"),
        ("huge", "cannot be read (it has 17,179,869,184 bytes; 268,435,456 bytes at most)"),
        ("none", "cannot be read (No such file or directory)"),
        ("a\0b", "cannot be read (embedded null byte)"),
    ):
        with pytest.raises(UnreadableFile) as caught:
            read_text(tmp_path / name)
        assert str(caught.value) == why
        assert isinstance(caught.value.__cause__, FileNotFoundError) == (name == "none")

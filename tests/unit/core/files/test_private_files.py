"""Folders and files that nobody else can plant, and modes that the umask decides on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from merak.core.files import private_files as private
from merak.core.files.private_files import (
    ForeignFile,
    give_usual_modes,
    own_folder,
    private_folder,
    read_own_file,
)


def test_a_private_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o755


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o644)
    assert read_own_file(path) == b"content"
    with pytest.raises(FileNotFoundError):
        read_own_file(tmp_path / "none")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_not_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(mode)
    with pytest.raises(ForeignFile, match=f"mode {mode:o}"):
        read_own_file(path)


def test_files_and_folders_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    folder = own_folder(tmp_path / "folder")
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(private.os, "getuid", lambda: -1)
    with pytest.raises(ForeignFile, match="belongs to another user"):
        read_own_file(path)
    with pytest.raises(ForeignFile, match="is not this user's alone"):
        own_folder(folder)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "folder")
    assert own_folder(folder) == folder
    folder.chmod(0o755)
    with pytest.raises(ForeignFile, match="mode 755"):
        own_folder(folder)


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own_folder(tmp_path / "folder"))
    with pytest.raises(ForeignFile, match="no folder"):
        own_folder(tmp_path / "link")


def test_modes_are_those_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = [tmp_path / "a", tmp_path / "inner" / "b"]
    for path, mode in zip(paths, (0o600, 0o755), strict=True):
        path.write_text("")
        path.chmod(mode)
    before = os.umask(0o027)
    try:
        give_usual_modes(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o640}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "inner"]

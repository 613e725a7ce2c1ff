"""Checkpoints that appear on remote storage, and go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from merak.checkpoint.files import inner_files
from merak.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, without_manifest
from merak.checkpoint.remote.folder import RemoteFolder
from merak.core.errors import SavingError, WeightsError


def start_remote(remote: RemoteFolder, is_own: bool) -> None:
    """Take the manifest of a checkpoint away in whose place another one is to be written.

    Args:
        remote: its folder.
        is_own: whether the name is the job's own; else a folder with other files is refused.

    Raises:
        WeightsError: it is refused.
        SavingError: it cannot be written.
    """
    found = remote.sizes()
    if not (is_own or MANIFEST in found) and any(not _is_of_rank(name) for name in found):
        raise WeightsError(
            f"{remote.url} has files already and is no checkpoint; save to a folder of its own."
        )
    remote.remove([MANIFEST])


def commit_remote(remote: RemoteFolder, folder: Path, manifest: Manifest) -> None:
    """Upload what rank 0 has beside tensors, and the manifest last.

    Args:
        remote: the checkpoint's folder, in which the ranks' files are.
        folder: the files on this host that are not there yet.
        manifest: of all files.

    Raises:
        SavingError: it cannot be written, or a file that a rank has uploaded is not whole.
    """
    for name in inner_files(folder):
        remote.put(folder / name, name)
    found = remote.sizes()
    for name, stored in manifest.files.items():
        if found.get(name) != stored.num_bytes:
            raise SavingError(
                f"{name} in {remote.url} has {found.get(name, 0):,} of {stored.num_bytes:,} bytes, "
                "though a rank has uploaded it; is another job writing there?"
            )
    with tempfile.TemporaryDirectory() as aside:
        written = Path(aside, MANIFEST)
        written.write_text(manifest.text(), encoding="utf-8")
        remote.put(written, MANIFEST)
    left = [name for name in found.keys() - manifest.files.keys() if _is_of_rank(name)]
    remote.remove(left)  # of a save that was cut off, on more ranks


def manifest_text(remote: RemoteFolder) -> str:
    """Read the text of a checkpoint's manifest.

    Args:
        remote: its folder.

    Raises:
        WeightsError: there is none, so there is no checkpoint, or it cannot be read.
    """
    text = remote.read_text(MANIFEST)
    if text is None:
        raise without_manifest(remote.url)
    return text


def remove_remote(remote: RemoteFolder) -> None:
    """Remove a checkpoint: its manifest, and then the files that this names, but no others.

    Args:
        remote: its folder.

    Raises:
        WeightsError: there is none.
        SavingError: it cannot be removed.
    """
    manifest = parse_manifest(remote.url, manifest_text(remote))
    remote.remove([MANIFEST])
    remote.remove(sorted(manifest.files))


def _is_of_rank(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".safetensors")

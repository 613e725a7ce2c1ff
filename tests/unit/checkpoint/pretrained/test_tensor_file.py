"""Safetensors files written tensor by tensor: the bytes of the library, and named damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merak.checkpoint.pretrained.tensor_file import (
    DTYPES,
    DamagedFile,
    TensorFile,
    check_file,
    lay_out,
    read_layout,
    read_tensor,
)
from merak.core.errors import WeightsError
from merak.core.tensor_meta import TensorMeta

State = dict[str, torch.Tensor]


def tensors() -> State:
    every = {f"of {name}": torch.arange(6).view(2, 3).to(dtype) for dtype, name in DTYPES.items()}
    special = {'"é"': torch.zeros(0, 3), "scalar": torch.tensor(2.5), "a": torch.randn(5)}
    return every | special


def metas(state: State) -> dict[str, TensorMeta]:
    return {key: TensorMeta(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}


def written(path: Path, state: State) -> Path:
    file = TensorFile(path, lay_out(metas(state)))
    for key in sorted(state, reverse=True):  # not the order of the file
        file.write(key, state[key])
    file.close()
    return path


def test_the_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    state = tensors()
    save_file(state, tmp_path / "expected", metadata={"format": "pt"})
    ours = written(tmp_path / "ours", state)
    assert ours.read_bytes() == (tmp_path / "expected").read_bytes()
    check_file(ours, lay_out(metas(state)))


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    state = {"t": torch.arange(6.0).view(2, 3).t(), "s": torch.arange(9)[::2]}
    path = written(tmp_path / "ours", state)
    found, begins = read_layout(path)
    for key, tensor in state.items():
        assert torch.equal(read_tensor(path, begins[key], found[key]), tensor)


def test_every_tensor_is_read_back(tmp_path: Path) -> None:
    state = tensors()
    path = written(tmp_path / "ours", state)
    found, begins = read_layout(path)
    assert found == metas(state)
    for key, tensor in state.items():
        read = read_tensor(path, begins[key], found[key])
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert bytes(read.reshape(-1).view(torch.uint8)) == bytes(
            tensor.reshape(-1).view(torch.uint8)
        )


def test_a_type_without_a_name_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"w is torch\.complex128, which safetensors cannot"):
        lay_out({"w": TensorMeta((2,), torch.complex128)})


@pytest.mark.parametrize("size", [0, 7, 8, 60, 300, -1])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, size: int) -> None:
    state = {f"weight of layer {n}": torch.randn(5, 5) for n in range(4)}
    path = written(tmp_path / "model.safetensors", state)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"model\.safetensors (is no whole|has)"):
        read_layout(path)
    with pytest.raises(DamagedFile, match=r"model\.safetensors has [\d,]+ bytes of [\d,]+"):
        check_file(path, lay_out(metas(state)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"X32"'),
        (b"[3,3]", b"[3,9]"),
        (b"[0,36]", b"[4,40]"),
        (b'{"__', b'["__'),
        (b'"shape"', b'"shame"'),
    ],
)
def test_a_header_that_makes_no_sense_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    state = {"w": torch.randn(3, 3)}
    path = written(tmp_path / "model.safetensors", state)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(DamagedFile, match=r"model\.safetensors has a header that cannot be read"):
        read_layout(path)
    with pytest.raises(DamagedFile, match=r"model\.safetensors has another header"):
        check_file(path, lay_out(metas(state)))


def test_a_tensor_beyond_the_end_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", {"w": torch.randn(3)})
    with pytest.raises(DamagedFile, match=r"model\.safetensors ends before"):
        read_tensor(path, path.stat().st_size - 4, TensorMeta((3,), torch.float32))

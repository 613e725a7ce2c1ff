"""What determines a model's graph, as a hash: its code, its configuration, its shapes, versions."""

from __future__ import annotations

import hashlib
import inspect
import platform
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from merak.graph.ir import TensorMeta

_SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_OWN_STATE = frozenset(nn.Module().__dict__) - {"training"}
"""What torch keeps in every module; parameters, buffers and children are described apart."""

_HASH_OF_A_PROCESS = "_original_object_hash"
"""An attribute of transformers' generation configs, which another process has another value of."""


def fingerprint(model: nn.Module, *others: Any) -> str:
    """A hash that changes whenever the graph of a model could.

    Args:
        model: described by every module's class, its source file and its attributes, by its
            parameters' and buffers' shapes and ties, and by its train or eval mode.
        others: whatever else the graph depends on: shapes, a loss function, versions.

    Returns:
        A hexadecimal string; equal for equal models, on every rank.
    """
    describer = _Describer()
    describer.add(("merak", _own_sources(), torch.__version__, transformers.__version__))
    describer.add(platform.python_version())
    describer.module_tree(model)
    for other in others:
        describer.add(other)
    return describer.digest()


@cache
def file_hash(path: str) -> str:
    """A hash of a source file's content; of nothing where it cannot be read."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def file_hashes(paths: Iterable[str]) -> dict[str, str]:
    """The hash of each of some files."""
    return {path: file_hash(path) for path in paths}


def _own_sources() -> str:
    folder = Path(__file__).parent
    return "".join(file_hash(str(path)) for path in sorted(folder.glob("*.py")))


class _Describer:
    """Feeds values into a hash; an object met again is named by the place of its first mention."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def digest(self) -> str:
        return self._hash.hexdigest()

    def module_tree(self, model: nn.Module) -> None:
        for name, module in model.named_modules(remove_duplicate=False):
            self._write("module", name)
            if self._is_known(module):
                continue
            self._class(type(module))
            for parts in (module._parameters, module._buffers):
                for key, tensor in parts.items():
                    self._write(key)
                    self._tensor(tensor)
            for key, value in module.__dict__.items():
                if key not in _OWN_STATE:
                    self._write(key)
                    self.add(value)

    def add(self, value: Any) -> None:
        """Describe a value and all that it holds."""
        if isinstance(value, _SCALARS):
            self._write(type(value).__name__, repr(value))
        elif isinstance(value, Enum):
            self._write("enum", str(value))
        elif isinstance(value, TensorMeta):
            self._write("meta", repr(value))
        elif isinstance(value, type):
            self._class(value)
        elif self._is_known(value):
            pass
        elif isinstance(value, torch.Tensor):
            self._numbers(value)
        elif isinstance(value, Mapping):
            self._write("mapping", str(len(value)))
            for key, item in value.items():
                if key != _HASH_OF_A_PROCESS:
                    self.add(key)
                    self.add(item)
        elif isinstance(value, (tuple, list)):
            self._write(type(value).__name__, str(len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, (set, frozenset)):
            self._write("set", *sorted(map(repr, value)))
        elif isinstance(value, nn.Module):
            self.module_tree(value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, types.MethodType):
            self.add(function.__self__)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            self._write("function", function.__qualname__, file_hash(function.__code__.co_filename))
            code = function.__code__
            self._write(code.co_code.hex())
            self.add([const for const in code.co_consts if isinstance(const, _SCALARS)])
            self.add([cell.cell_contents for cell in function.__closure__ or ()])
            self.add(function.__defaults__)
            return
        self._class(type(value))
        state = getattr(value, "__dict__", None)
        slots = {k: getattr(value, k) for k in getattr(value, "__slots__", ()) if hasattr(value, k)}
        if state is None and not slots:
            self._write(repr(value))  # an address in it makes the trace one of its own
        self.add({**(state or {}), **slots})

    def _class(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            module = inspect.getmodule(base)
            self._write(base.__qualname__, file_hash(getattr(module, "__file__", None) or ""))

    def _tensor(self, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self._write("none")
        elif not self._is_known(tensor):
            kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
            self._write("tensor", repr(kind))

    def _numbers(self, tensor: torch.Tensor) -> None:
        """A tensor that is no parameter or buffer: the graph may hold its numbers."""
        self._tensor(tensor)
        if not tensor.is_meta:
            data = tensor.detach().cpu().contiguous().view(-1)
            self._hash.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")

    def _is_known(self, value: Any) -> bool:
        if id(value) in self._seen:
            self._write("again", str(self._seen[id(value)]))
            return True
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)  # so that no other object gets its id
        return False

    def _write(self, *words: str) -> None:
        for word in words:
            self._hash.update(f"{len(word)}:{word}".encode())

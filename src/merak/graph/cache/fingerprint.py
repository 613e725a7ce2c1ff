"""Fingerprint of a model's graph: a hash of its code, its configuration, its shapes and versions.

`datasets.fingerprint.Hasher` is no substitute: dill names functions and classes of importable
modules without their code, so that an edited model would keep its hash, and it reads the data of
every parameter, which may be terabytes or on the meta device.

Nor is a `Snapshot`, which compares states of one model in one process, by identity where values are
no plain ones: of two equal Llamas a quarter of its items differ, and none where one is in another
dtype or its class has another method. A fingerprint has code and all values whole, whatever their
size, and where an object cannot be looked into, its address, so that its trace is one of its own.
Torch's settings, which a trace depends on, are told by one list.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils.generic import GeneralInterface

from merak.core.source_lines import MERAK, is_installed, is_standard_library, module_file
from merak.core.storages import memory_of
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.state.kept import triangle_of
from merak.graph.trace.state.outside import torch_settings

logger = logging.getLogger(__name__)

_SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_VERSIONED = ("torch", "transformers", "builtins")
"""Packages that the fingerprint tells apart by version."""

_VERSIONED_FOLDERS = tuple(f"{Path(str(p.__file__)).parent}{os.sep}" for p in (torch, transformers))

_HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)
_OWN_STATE = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every torch module; parameters, buffers, children, hooks are described apart."""

_SKIPPED = frozenset({"_original_object_hash", "_flat_weights", "_flat_weight_refs"})
"""A hash that transformers' generation configs hold and another process has another value of; and
second lists of their parameters that recurrent modules keep."""


def fingerprint(model: nn.Module, *others: Any) -> str:
    """Fingerprint of a model's graph, which changes whenever the graph could.

    Args:
        model: described by every module's class, its source file and its attributes, by its
            parameters' and buffers' shapes and ties, and by its train or eval mode.
        others: whatever else the graph depends on: shapes, a loss function, versions.

    Returns:
        A hexadecimal string, equal for equal models on every rank; "" where code of an object that
        the model holds, such as its length or how it is pickled, raises an error.
    """
    try:
        return _fingerprint(model, others)
    except Exception as error:
        logger.info("The trace is not stored: hashing the model ends with %r.", error)
        return ""


def _fingerprint(model: nn.Module, others: Iterable[Any]) -> str:
    describer = _Describer(model)
    describer.add(("merak", _own_sources(), torch.__version__, transformers.__version__))
    settings = {name: v for name, v in torch_settings().items() if name != "set_num_threads"}
    describer.add((platform.python_version(), settings))
    describer.module_tree(model)
    describer.replaced_functions(model)
    for other in others:
        describer.add(other)
    return describer.digest()


@cache
def file_hash(path: str) -> str:
    """Hash of a source file's content; of nothing where it cannot be read."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def file_hashes(paths: Iterable[str]) -> dict[str, str]:
    """Hashes of source files, by path."""
    return {path: file_hash(path) for path in paths}


def loaded_sources(model: nn.Module) -> frozenset[str]:
    """Source files of loaded modules that the model's code may call.

    A trace tells the files of forwards alone, not of the functions they call.
    """
    packages = _packages(model) - {*_VERSIONED, "merak"}
    files = set()
    for name in list(sys.modules):
        file = module_file(name)
        if not file or not file.endswith(".py") or _package(name) == "merak":
            continue
        if _package(name) in packages or not is_installed(file):
            files.add(file)
    return frozenset(files)


def is_code_of(model: nn.Module, module: str) -> bool:
    """Whether a loaded module is the user's own, or of the package that the model is from."""
    if _package(module) in _packages(model) - {"torch", "builtins"}:
        return True
    file = module_file(module)
    return bool(file) and not is_installed(str(file))


def _packages(model: nn.Module) -> set[str]:
    return {_package(type(module).__module__) for module in model.modules()}


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def _own_sources() -> str:
    folder = Path(__file__).parents[1]
    return "".join(file_hash(str(path)) for path in sorted(folder.rglob("*.py")))


class _Describer:
    """Hash of nested values; an object met again is named by the place of its first mention.

    Args:
        model: its parameters and buffers count without their numbers, wherever they are met.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._without_numbers = self._buffers | {id(weight) for weight in model.parameters()}
        self._modules = {id(m): name for name, m in model.named_modules()}

    def digest(self) -> str:
        return self._hash.hexdigest()

    def module_tree(self, model: nn.Module) -> None:
        """Hash a tree of modules: their classes, attributes, parameters and buffers."""
        for name, module in model.named_modules(remove_duplicate=False):
            self._write("module", name)
            if self._is_known(module):
                continue
            self._class(type(module))
            for parts in (module._parameters, module._buffers):
                for key, tensor in parts.items():
                    self._write(key)
                    self.add(tensor)
            for key, value in module.__dict__.items():
                if key in _HOOKS and value:
                    self._write(key)  # hooks are kept by numbers that count a process's hooks
                    self.add(list(value.values()) if isinstance(value, Mapping) else value)
                elif key not in _OWN_STATE and key not in _SKIPPED:
                    self._write(key)
                    self.add(value)

    def replaced_functions(self, model: nn.Module) -> None:
        """Hash functions that have been put in the place of others, in libraries that forward uses.

        Files and versions say what a library has defined, and not what a script has assigned:
        `nn.functional.cross_entropy = f`, `modeling_llama.apply_rotary_pos_emb = f`, a table's `f`.
        """
        for owner, own in _namespaces(model):
            for name, function in _foreign_functions(own):
                file = function.__code__.co_filename
                self._write(owner, name, function.__module__ or "", function.__qualname__)
                if is_installed(file):
                    self._write(file_hash(file))
                else:
                    self.add(function)

    def add(self, value: Any) -> None:
        """Hash a value and everything that it holds."""
        if isinstance(value, _SCALARS):
            self._write(type(value).__name__, repr(value))
        elif isinstance(value, Enum):
            self._write("enum", str(value))
        elif isinstance(value, TensorMeta):
            self._write("meta", repr(value))
        elif isinstance(value, type):
            self._class(value)
        elif id(value) in self._modules and id(value) not in self._seen:
            self._write("part", self._modules[id(value)])
        elif self._is_known(value):
            pass
        else:
            self._new(value)

    def _new(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self.module_tree_of_another(value)
        elif isinstance(value, Mapping):
            self._write("mapping", type(value).__name__, str(len(value)))
            for key, item in value.items():
                if key not in _SKIPPED:
                    self.add(key)
                    self.add(item)
        elif isinstance(value, (tuple, list)):
            self._write(type(value).__name__, str(len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, (set, frozenset)):
            self._write("set", *sorted(map(repr, value)))
        elif isinstance(value, types.CodeType):
            self._code(value)
        else:
            self._object(value)

    def module_tree_of_another(self, module: nn.Module) -> None:
        """Hash a module outside the model, such as a loss, with its tensors' values."""
        del self._seen[id(module)]
        self.module_tree(module)

    def _object(self, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self.add(value.__self__)
            self.add(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            self._write("named", str(getattr(value, "__module__", "")), value.__name__)
        elif _reduces_itself(type(value)):
            self._class(type(value))
            self.add(_reduced(value))
        else:
            self._class(type(value))
            slots = {
                key: getattr(value, key)
                for cls in type(value).__mro__
                for key in _names(cls.__dict__.get("__slots__", ()))
                if hasattr(value, key)
            }
            state = getattr(value, "__dict__", None)
            if state is None and not slots:
                self._write(repr(value))  # an address in it makes the trace one of its own
            self.add({**(state or {}), **slots})

    def _function(self, function: types.FunctionType) -> None:
        self._write("function", function.__qualname__, file_hash(function.__code__.co_filename))
        self._code(function.__code__)
        self.add([_content(cell) for cell in function.__closure__ or ()])
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        if not _is_library(function.__module__):
            self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        """Hash the globals that a function reads: no file has what a notebook has set."""
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            is_own = getattr(value, "__module__", None) == function.__module__
            if isinstance(value, (*_SCALARS, torch.Tensor, tuple, list, dict)) or is_own:
                self._write(name)
                self.add(value)

    def _code(self, code: types.CodeType) -> None:
        self._write("code", code.co_code.hex(), *code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            self.add(constant)
            if isinstance(constant, str) and constant in os.environ:  # which code may ask for
                self._write(os.environ[constant])

    def _class(self, cls: type) -> None:
        self._write(cls.__module__, cls.__qualname__)
        if self._is_known(cls):
            return
        for base in cls.__mro__[:-1]:
            self._write(base.__qualname__, file_hash(module_file(base.__module__) or ""))
            self._methods(base)

    def _methods(self, cls: type) -> None:
        """Hash methods that no library version identifies: the user's own, and patches."""
        is_library = _is_library(cls.__module__)
        for name, value in cls.__dict__.items():
            function = getattr(value, "__func__", value)
            is_plain = isinstance(value, (*_SCALARS, torch.Tensor)) and not name.startswith("__")
            if isinstance(function, types.FunctionType):
                if is_library and _is_library(function.__module__):
                    continue
                self._write(name)
                self.add(function)
            elif is_plain and not is_library:
                self._write(name)
                self.add(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Hash a tensor's shape and dtype; its values too where the graph may hold them."""
        if tensor.is_nested:  # whose sizes and memory are those of its parts
            self.add(tensor.detach().unbind())
            return
        kind = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self._write("tensor", repr(kind), repr(tensor.stride()))
        own = {name: v for name, v in vars(tensor).items() if isinstance(v, _SCALARS)}
        self.add({name: value for name, value in own.items() if name[0] != "_"})
        if id(tensor) in self._buffers:
            self.add(triangle_of(tensor))  # of which a trace may have made `is_causal`
        if id(tensor) not in self._without_numbers and not tensor.is_meta:
            data = tensor.detach().cpu().contiguous()
            self._hash.update(memory_of(data))

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


def _namespaces(model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names that a model's code looks functions up by: of its modules, and of those they import."""
    yield "Tensor", vars(torch.Tensor)
    names = {"torch", "torch.functional", "torch.nn.functional"}
    names |= {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    seen, left = set(names), sorted(names)
    while left:
        name = left.pop()
        own = dict(vars(sys.modules[name])) if name in sys.modules else {}
        yield name, own
        packages = {function.__module__ for _, _, function in _functions(own)}
        further = {one for one in packages if one and _package(one) == "transformers"} - seen
        seen |= further
        left += sorted(further)


def _functions(own: Mapping[str, Any]) -> Iterator[tuple[str, str, types.FunctionType]]:
    """Functions of a namespace and of tables in it: labels, names if they have one, functions."""
    for name, value in own.items():
        cls = type(value)
        if cls is types.FunctionType:
            yield name, name, value
        elif cls is dict or GeneralInterface in cls.__mro__:
            for key, held in value.items():
                if type(held) is types.FunctionType:
                    yield f"{name}[{key!r}]", "", held


def _foreign_functions(own: Mapping[str, Any]) -> list[tuple[str, types.FunctionType]]:
    """Functions that are not what was defined by their name, in a namespace and its tables."""
    found = []
    for label, name, function in _functions(own):
        file = function.__code__.co_filename
        is_own = file.startswith(_VERSIONED_FOLDERS) or file == own.get("__file__")
        is_known = is_own and function.__name__ == name
        if not (is_known or file.startswith(MERAK) or is_standard_library(file)):
            found.append((label, function))
    return sorted(found, key=lambda one: one[0])


def _reduced(value: Any) -> Any:
    """State of an object as pickle has it, or its text."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:
        return repr(value)
    return parts if isinstance(parts, str) else [_listed(part) for part in parts]


def _reduces_itself(cls: type) -> bool:
    """Whether a class defines how its objects are pickled, as `functools.partial` does."""
    own = ("__reduce__", "__reduce_ex__")
    return any(name in base.__dict__ for base in cls.__mro__[:-1] for name in own)


def _listed(part: Any) -> Any:
    return list(part) if isinstance(part, Iterator) else part


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_library(module: str | None) -> bool:
    """Whether a module's code is identified by a version that the fingerprint holds."""
    return _package(module or "") in _VERSIONED

"""A mesh that nothing runs on: trainers that do not know of it, and jobs that end without one.

Without `MerakTrainer` and `merak.parallelize` every rank trains the whole model by itself, or with
the others as replicas, whatever the degrees say.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from merak.core.elastic import AUTO_PLAN
from merak.core.errors import MeshError
from merak.core.mesh import Mesh, current_mesh, has_mesh, is_used
from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)

_TRAINERS = "transformers.trainer"


def watch_for_no_use() -> None:
    """Refuse trainers that do not run on the mesh, and say at the end if nothing has run on it."""
    if _TRAINERS in sys.modules:
        _guard(sys.modules[_TRAINERS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    atexit.unregister(_warn_at_end)
    atexit.register(_warn_at_end, os.getpid())


def split_degrees(mesh: Mesh) -> str:
    """The degrees of a mesh that mere replicas do not have, as "tp=2, pp=4"; empty if none.

    Args:
        mesh: of the job; degrees that a plan is still to choose count, too.
    """
    if mesh.given is not None:
        return f"plan={AUTO_PLAN!r}"
    axes = ((axis, getattr(mesh, axis)) for axis in ("tp", "pp", "cp", "ep"))
    return ", ".join(f"{axis}={degree}" for axis, degree in axes if degree > 1)


class _Finder:
    """Finder that guards transformers' trainer when it is imported, which takes seconds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the module by the other finders, and guard it once it has run."""
        if name != _TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_guard(module: ModuleType) -> None:
            run(module)
            _guard(module)

        spec.loader.exec_module = run_and_guard  # type: ignore[method-assign]
        return spec


def _guard(module: ModuleType) -> None:
    """Let the class of trainers refuse to be made where it would leave the mesh unused."""
    trainer: Any = module.Trainer
    if "__new__" in vars(trainer):
        return

    def make(cls: type, *args: object, **kwargs: object) -> object:
        _refuse(cls)
        return object.__new__(cls)

    make.__signature__ = inspect.signature(trainer.__init__)  # type: ignore[attr-defined]
    trainer.__new__ = make


def _refuse(cls: type) -> None:
    """Refuse a trainer that is none of Merak's.

    Raises:
        MeshError: the mesh is more than replicas.
    """
    degrees = split_degrees(current_mesh()) if has_mesh() else ""
    if degrees and not any(base.__module__.startswith("merak.") for base in cls.__mro__):
        raise MeshError(
            f"{cls.__name__} does not run on the mesh of merak.init({degrees}): every rank would "
            "train the whole model as a replica; use merak.MerakTrainer, or a subclass of it, with "
            "merak.MerakArguments, or leave the degrees out (dp alone)."
        )


def _warn_at_end(pid: int) -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    if os.getpid() != pid or not has_mesh() or is_used() or has_failed:
        return
    degrees = split_degrees(current_mesh())
    if degrees:
        warn_on_rank0(
            logger,
            "This process ends, and nothing has run on the mesh of merak.init(%s): neither "
            "merak.MerakTrainer nor merak.parallelize has laid out a model. Whatever it trained, "
            "each rank trained by itself or as a replica; use one of the two, or leave the degrees "
            "out.",
            degrees,
        )

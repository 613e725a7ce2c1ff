"""Twins: a frozen teacher's parameters, and those of the student that has the same structure.

A script averages the one with the other between steps, so each rank must have the same shards of
both, though a search by operators alone may shard what has gradients otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from merak.core.tensor_meta import TensorMeta
from merak.graph.tensor_parallel.placement import PartlySharded, Shard

_Structure = frozenset[tuple[str, tuple[int, ...], str]]


@dataclass(slots=True)
class _Module:
    """A module, as the names of its parameters show it."""

    path: tuple[str, ...]
    parameters: dict[str, TensorMeta] = field(default_factory=dict)

    @property
    def structure(self) -> _Structure:
        """Names, shapes and types, the same for modules of one structure."""
        named = self.parameters.items()
        return frozenset((name, meta.shape, str(meta.dtype)) for name, meta in named)

    @property
    def trains(self) -> bool:
        """Whether any parameter has gradients."""
        return any(meta.requires_grad for meta in self.parameters.values())

    @property
    def num_layers(self) -> int:
        """Number of modules with parameters of their own."""
        return len({name.rpartition(".")[0] for name in self.parameters})


def find_twins(parameters: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Names of the teachers' parameters, and of the students' that each is a twin of.

    A teacher is the largest module that is frozen as a whole and has the structure of one that is
    trained: of several layers, or the only one of its structure beside it.

    Args:
        parameters: of the model, by name.
    """
    if all(meta.requires_grad for meta in parameters.values()):
        return {}
    modules = sorted(_modules(parameters).values(), key=lambda module: len(module.path))
    students: dict[_Structure, list[_Module]] = {}
    for module in modules:
        if module.trains:
            students.setdefault(module.structure, []).append(module)
    twins: dict[str, str] = {}
    for teacher in modules:
        found = students.get(teacher.structure, []) if not teacher.trains else []
        found = [s for s in found if not _contains(s.path, teacher.path)]
        if teacher.num_layers < 2:
            beside = [s for s in found if s.path[:-1] == teacher.path[:-1]]
            found = beside if len(beside) == 1 else []
        if not found:
            continue
        student = max(found, key=lambda module: _likeness(module.path, teacher.path))
        for name in teacher.parameters:
            twins.setdefault(_join(teacher.path, name), _join(student.path, name))
    return twins


def differ(twins: Mapping[str, str], chosen: Mapping[str, object]) -> bool:
    """Whether any twins are placed differently."""
    return any(chosen.get(teacher) != chosen.get(student) for teacher, student in twins.items())


def matched_placements(
    twins: Mapping[str, str],
    chosen: Mapping[str, Shard | PartlySharded],
    fixed: Collection[str],
) -> Iterator[dict[str, Shard | PartlySharded]]:
    """Placements in which twins are alike: teachers as their students, or the other way round.

    Args:
        twins: from `find_twins`.
        chosen: placements of the parameters that are split, by name.
        fixed: names of parameters whose placement stays.
    """
    for pairs in (twins.items(), ((student, teacher) for teacher, student in twins.items())):
        placed = dict(chosen)
        for own, other in pairs:
            if own in fixed:
                continue
            placed.pop(own, None)
            if other in chosen:
                placed[own] = replace(chosen[other], origin=own)
        if not differ(twins, placed):
            yield placed


def _modules(parameters: Mapping[str, TensorMeta]) -> dict[tuple[str, ...], _Module]:
    found: dict[tuple[str, ...], _Module] = {}
    for name, meta in parameters.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            module = found.setdefault(tuple(parts[:depth]), _Module(tuple(parts[:depth])))
            module.parameters[".".join(parts[depth:])] = meta
    return found


def _contains(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shortest = min(len(one), len(other))
    return one[:shortest] == other[:shortest]


def _likeness(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[int, int]:
    """How many names at the end and at the beginning of two paths are the same."""
    pairs = list(zip(one, other, strict=False))
    ends = list(zip(reversed(one), reversed(other), strict=False))
    return _leading(ends), _leading(pairs)


def _leading(pairs: list[tuple[str, str]]) -> int:
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _join(path: tuple[str, ...], name: str) -> str:
    return ".".join((*path, name))

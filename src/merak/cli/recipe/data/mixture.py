"""Several datasets in one: their records in turn, drawn by weight."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merak.cli.recipe.data.records import Part, Records, Source, find_source
from merak.cli.recipe.schema import DataRecipe
from merak.core.errors import CommandError, did_you_mean

Record = Mapping[str, Any]

FIELDS = ("source", "subset", "split", "files", "column", "weight")
"""Fields of an entry of `data.mix`: those of a dataset alone, and how often its records come."""


@dataclass(frozen=True, slots=True)
class Renamed(Records):
    """Records whose column of text is called as in the other datasets.

    Args:
        own: what it is called here.
    """

    own: str = ""

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, with their text alone."""
        for row in Records.__iter__(self):
            yield {self.column: row.get(self.own)}

    @property
    def columns(self) -> list[str]:
        """Names of the fields."""
        return [self.column]

    @property
    def text_files(self) -> bool:
        """Whether a record is the text of a file, of which none has columns of its own."""
        return False


@dataclass(frozen=True, slots=True)
class Mixture(Records):
    """Records of several datasets.

    Args:
        parts: the records of each.
        weights: of each; empty for one dataset behind the other.
        seed: of the order in which they come.
    """

    parts: tuple[Records, ...] = ()
    weights: tuple[float, ...] = ()
    seed: int = 0

    def stamp(self) -> list[object]:
        """Fingerprint that changes when a record does."""
        return [self.weights, *(part.stamp() for part in self.parts)]

    def __iter__(self) -> Iterator[Record]:
        """Yield the records."""
        return drawn([part.__iter__ for part in self.parts], self.weights, self.seed)

    def each(self) -> tuple[Records, ...]:
        """The records of each dataset."""
        return self.parts

    @property
    def columns(self) -> list[str]:
        """Names of the fields that the records of some dataset have."""
        return list(dict.fromkeys(name for part in self.parts for name in part.columns))

    @property
    def text_files(self) -> bool:
        """Whether a record is the text of a file."""
        return all(part.text_files for part in self.parts)

    def check_column(self, column: str, source: str) -> None:
        """Refuse a column that some dataset does not have, as of `Records`."""
        for part in self.parts:
            part.check_column(column, source)


def drawn(
    parts: Sequence[Callable[[], Iterable[Record]]], weights: Sequence[float], seed: int
) -> Iterator[Record]:
    """Draw records of several datasets by weight, until each has been read to its end.

    A dataset that ends before begins anew: no record is left out. Without weights, one dataset
    comes behind the other, and each record once.

    Args:
        parts: give the records of each from the first.
        weights: how often a record of each comes; none for each record once.
        seed: of what is drawn.
    """
    if not weights:
        for part in parts:
            yield from part()
        return
    draws, places = random.Random(seed), range(len(parts))
    running = [iter(part()) for part in parts]
    ended = [False] * len(parts)
    while not all(ended):
        (place,) = draws.choices(places, weights)
        found = next(running[place], None)
        if found is None:
            ended[place] = True
            running[place] = iter(parts[place]())
            found = None if all(ended) else next(running[place], None)
        if found is not None:
            yield found


def find_data(recipe: DataRecipe, seed: int = 0) -> Source:
    """Find the data that a recipe names: one dataset, or several.

    Args:
        recipe: of the data.
        seed: of the order in which records of several come.

    Raises:
        CommandError: as of `find_source`; or an entry of `mix` is wrong.
    """
    return find_source(recipe) if recipe.mix is None else _find_mixture(recipe, seed)


def _find_mixture(recipe: DataRecipe, seed: int) -> Source:
    parts = [_part(entry, number, recipe) for number, entry in enumerate(recipe.mix or ())]
    if not parts:
        raise CommandError("data.mix names no dataset; give it some, or data.source.")
    if any(part.source.images for part in parts):
        raise CommandError("data.mix mixes text and conversations; images are one dataset.")
    if not weights_of(parts) and recipe.streaming:
        raise CommandError(
            "data.streaming=true reads several datasets in turn, and so needs to know how often; "
            "give each entry of data.mix a weight."
        )
    weights = weights_of(parts)
    train = Mixture((), recipe.column, None, tuple(p.source.train for p in parts), weights, seed)
    others = [part.source.held_out for part in parts]
    found = tuple(one for one in others if one is not None)
    held_out = Mixture((), recipe.column, None, found) if found else None
    return Source(train, held_out, parts=tuple(parts))


def weights_of(parts: Sequence[Part]) -> tuple[float, ...]:
    """The weights of datasets; empty where none has one.

    Args:
        parts: the datasets.

    Raises:
        CommandError: some have one, and some have none.
    """
    weights = tuple(part.weight for part in parts if part.weight is not None)
    if weights and len(weights) < len(parts):
        raise CommandError(
            f"{len(weights)} of the {len(parts)} entries of data.mix have a weight; give all of "
            "them one, or none, so that each record comes once."
        )
    return weights


def _part(entry: object, number: int, recipe: DataRecipe) -> Part:
    where = f"data.mix[{number}]"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("source"), str):
        raise CommandError(f"{where} names no dataset; give it a source, and a weight.")
    for name in entry:
        if name not in FIELDS:
            meant = did_you_mean(str(name), FIELDS)
            raise CommandError(f"{where} has no field {name!r}{meant}")
    weight = entry.get("weight")
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is not None and not (is_number and weight > 0):
        raise CommandError(f"{where} has the weight {weight!r}; use a number above 0.")
    own = {name: entry[name] for name in FIELDS[:4] if name in entry}
    alone = dataclasses.replace(recipe, mix=None, column=entry.get("column", recipe.column), **own)
    found = find_source(alone)
    if alone.column != recipe.column:
        found = Source(
            *(_renamed(one, alone, recipe.column) for one in (found.train, found.held_out))
        )
    return Part(found, None if weight is None else float(weight))


def _renamed(records: Records | None, alone: DataRecipe, column: str) -> Any:
    if records is None:
        return None
    if records.text_files:  # whose text has no name of its own
        return dataclasses.replace(records, column=column)
    records.check_column(alone.column, alone.source)
    return Renamed(records.files, column, records.dataset, alone.column)

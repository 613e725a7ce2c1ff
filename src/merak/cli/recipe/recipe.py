"""Recipes: the YAML files of `merak train`, checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from merak.core.elastic import AUTO_PLAN, plan_degrees, plan_expert_degree
from merak.core.errors import did_you_mean
from merak.launch.errors import CommandError

Section = TypeVar("Section")

STANDARD_LIBRARY = "standard-library"
"""The data source that every machine has: the source files of Python's own library."""

TRAIN_TOKENIZER = "train"
"""The tokenizer that is trained on the recipe's own text."""

_LARGEST_VOCABULARY = 2_000_000
"""Entries; tables for the training of far more end the process."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Model section of a recipe.

    Args:
        name: a transformers class name, or a folder (weights are used) or file with a config.
        config: fields of the config to change.
        trust_remote_code: whether code in the model's folder may run.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """Data section of a recipe.

    Args:
        source: "standard-library", a folder of text files, a JSON lines file, or a dataset that
            `datasets` saved to disk.
        files: the pattern of a folder's text files.
        column: the column of a dataset or JSON lines file that holds text.
        tokenizer: "train" for a byte-level BPE trained on the source, or a tokenizer's folder.
        vocabulary: entries of a tokenizer that is trained.
        sequence: tokens of one sample; text is packed into samples of this length.
        held_out: share of the texts that are kept for evaluation.
        max_bytes: read no more text than this; null for all.
    """

    source: str = STANDARD_LIBRARY
    files: str = "**/*.txt"
    column: str = "text"
    tokenizer: str = TRAIN_TOKENIZER
    vocabulary: int = 4096
    sequence: int = 128
    held_out: float = 0.05
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel section of a recipe.

    Args:
        dp: data parallel degree; null for 1, or with `plan: auto` for what the plan chooses.
        tp: tensor parallel degree; as dp.
        pp: pipeline parallel degree; as dp.
        cp: context parallel degree; null for 1.
        elastic: whether torchrun may start fewer ranks, as of `merak.init`.
        ranks: number of ranks that `plan: auto` is for, where torchrun does not start them; null
            for one on every GPU of the machine, and on the CPU for as few as the degrees allow.
        ep: expert parallel degree: that of tp, or where tp is 1 a divisor of dp × cp; null for 1.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    elastic: bool = False
    ranks: int | None = None
    ep: int | None = None

    def axes(self) -> dict[str, int]:
        """Return the degrees by axis; 1 for one that is not given."""
        given = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        return {axis: 1 if degree is None else degree for axis, degree in given.items()}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, unless a plan is to be searched for more."""
        return math.prod(self.axes().values()) if self.ranks is None else self.ranks


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of one training run.

    Args:
        model: what is trained.
        data: what it is trained on.
        parallel: the degrees.
        arguments: fields of `merak.MerakArguments`; `output_dir` is where results go.
        plan: file of a plan, whose degrees and layout count; "auto" to search the fastest one for
            the devices that are there; null for none.
    """

    model: ModelRecipe
    data: DataRecipe
    parallel: Degrees
    arguments: dict[str, Any]
    plan: str | None = None

    @property
    def output_dir(self) -> Path:
        """Folder of the run's results."""
        return Path(str(self.arguments["output_dir"])).expanduser()


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2: `1e-4` is a number, and `off`, `on`, `yes` and `no` are words."""


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_BOOL, _FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    "-+0123456789.",
)


def read_recipe(file: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        CommandError: the file cannot be read, or a field is unknown, missing or of a wrong kind.
    """
    try:
        parsed = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # a safe one
    except OSError as cause:
        raise CommandError(f"the recipe {file} cannot be read: {cause.strerror}.") from cause
    except (yaml.YAMLError, UnicodeDecodeError) as cause:
        where = " ".join(str(cause).split())
        raise CommandError(f"the recipe {file} is not YAML: {where}.") from cause
    return parse_recipe(parsed)


def parse_recipe(parsed: object) -> Recipe:
    """Check a recipe's content.

    Args:
        parsed: the mapping that the YAML file holds.

    Raises:
        CommandError: a field is unknown, missing or of a wrong kind.
    """
    sections = _mapping("the recipe", parsed)
    known = [part.name for part in dataclasses.fields(Recipe)]
    for name in sections:
        if name not in known:
            raise CommandError(
                f"the recipe has no section {name!r}{did_you_mean(str(name), known)}"
            )
    plan = sections.get("plan")
    _check_kind("plan", plan, str | None)
    recipe = Recipe(
        model=_section(ModelRecipe, "model", sections.get("model")),
        data=_section(DataRecipe, "data", sections.get("data")),
        parallel=_parallel(sections.get("parallel"), plan),
        arguments=_arguments(sections.get("arguments")) | ({} if plan is None else {"plan": plan}),
        plan=plan,
    )
    _check_values(recipe)
    return recipe


def _parallel(parsed: object, plan: Any) -> Degrees:
    """The degrees: those of the plan, where there is one, which the recipe may repeat."""
    given = _section(Degrees, "parallel", parsed)
    if plan == AUTO_PLAN and given.elastic:
        raise CommandError(
            "parallel.elastic lowers degrees that are given, but plan: auto chooses them for the "
            "ranks that are there; leave it out, and set arguments.global_batch."
        )
    if given.ranks is not None and plan != AUTO_PLAN:
        raise CommandError(
            f"parallel.ranks={given.ranks} is for plan: auto; give dp, tp and pp instead."
        )
    if plan is None or plan == AUTO_PLAN:
        return given
    planned = plan_degrees(plan)._asdict()
    for axis, degree in _mapping("parallel", parsed).items():
        if degree not in (None, planned.get(axis, degree)):
            raise CommandError(
                f"parallel.{axis}={degree} contradicts the plan {plan}, which has "
                f"{axis}={planned[axis]}; leave it out, or plan again."
            )
    ep = plan_expert_degree(plan)
    if given.ep not in (None, ep):
        raise CommandError(
            f"parallel.ep={given.ep} contradicts the plan {plan}, which has ep={ep}; leave it "
            "out, or plan again."
        )
    return Degrees(**planned, elastic=given.elastic, ep=ep)


def _arguments(parsed: object) -> dict[str, Any]:
    from merak.arguments import MerakArguments

    given = _mapping("arguments", parsed)
    known = [part.name for part in dataclasses.fields(MerakArguments)]
    for name in given:
        if name not in known:
            raise CommandError(f"arguments has no field {name!r}{did_you_mean(str(name), known)}")
    if not given.get("output_dir"):
        raise CommandError("arguments.output_dir is missing; name the folder for the results.")
    return dict(given)


def _section(kind: type[Section], name: str, parsed: object) -> Section:
    given = _mapping(name, parsed)
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        if key not in hints:
            raise CommandError(f"{name} has no field {key!r}{did_you_mean(str(key), hints)}")
        _check_kind(f"{name}.{key}", value, hints[key])
    missing = [
        part.name
        for part in dataclasses.fields(kind)  # type: ignore[arg-type]
        if part.name not in given and _is_required(part)
    ]
    if missing:
        raise CommandError(f"{name}.{missing[0]} is missing from the recipe.")
    return kind(**given)


def _is_required(part: dataclasses.Field[Any]) -> bool:
    return part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING


def _check_kind(name: str, value: object, hint: Any) -> None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(option) or option for option in options)
    if float in kinds:
        kinds += (int,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        raise CommandError(f"{name}={value!r} should be of kind {wanted}.")


def _mapping(name: str, parsed: object) -> Mapping[str, Any]:
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise CommandError(f"{name} should hold named fields, not {parsed!r}.")
    return parsed


def _check_values(recipe: Recipe) -> None:
    data = recipe.data
    counts = recipe.parallel.axes() | {"ranks": recipe.parallel.num_ranks}
    for axis, degree in counts.items():
        if degree < 1:
            raise CommandError(f"parallel.{axis}={degree} is not a degree; use 1 or more.")
    if not 0 <= data.held_out <= 0.5:
        raise CommandError(f"data.held_out={data.held_out} is not a share; use 0 up to 0.5.")
    if data.vocabulary > _LARGEST_VOCABULARY:
        raise CommandError(
            f"data.vocabulary={data.vocabulary} is too large; use {_LARGEST_VOCABULARY} or less."
        )
    for name, least in (("sequence", 2), ("vocabulary", 260), ("max_bytes", 1)):
        value = getattr(data, name)
        if value is not None and value < least:
            raise CommandError(f"data.{name}={value} is too small; use {least} or more.")

"""Recipes: the YAML files of `merak train`, checked before anything is started."""

from __future__ import annotations

import dataclasses
import functools
import logging
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from merak.arguments.former import ARGUMENTS, accepted_arguments
from merak.cli.recipe.draft import AUTO_BF16
from merak.cli.recipe.foreign.translate import translated
from merak.cli.recipe.ready import READY, ready_text
from merak.cli.recipe.schema import FORMATS_OF_SECTIONS, SECTIONS, Degrees, ModelRecipe, Recipe
from merak.cli.recipe.source import Origins, Written, parse_source, with_overrides
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import (
    CommandError,
    MerakError,
    collected,
    did_you_mean,
    raise_all,
    todays_name,
)
from merak.core.files.plan_file import plan_degrees
from merak.core.kinds import fits, kind_names
from merak.core.packages import refuse_missing
from merak.launch.clusters.job import RECIPES
from merak.zoo.hub import find_hub_file
from merak.zoo.model_source import CONFIG_FILE

if TYPE_CHECKING:
    from merak.zoo.model_source import ModelSource

logger = logging.getLogger(__name__)

Section = TypeVar("Section")

FORMER: Mapping[str, Mapping[str, str]] = {
    "model": {"torch_dtype": "dtype", "model_name_or_path": "name", "path": "name"},
    "data": {
        "block_size": "sequence",
        "dataset": "source",
        "dataset_name": "source",
        "max_length": "sequence",
        "max_seq_length": "sequence",
        "path": "source",
        "seq_length": "sequence",
    },
    "parallel": {
        "context_parallel_size": "cp",
        "data_parallel_size": "dp",
        "expert_parallel_size": "ep",
        "pipeline_model_parallel_size": "pp",
        "pipeline_parallel_size": "pp",
        "tensor_model_parallel_size": "tp",
        "tensor_parallel_size": "tp",
    },
    "arguments": ARGUMENTS,
}
"""What fields that other tools, or earlier versions, have are called here."""

NAMES = (*SECTIONS, "arguments", "lora", "plan")
"""Names of a recipe's sections."""


def read_recipe(
    file: Path | str, overrides: Sequence[str] = (), *, needs_data: bool = True
) -> Recipe:
    """Read and check a recipe.

    Args:
        file: the recipe, or the name of one that comes with Merak.
        overrides: changes of its fields, such as `arguments.learning_rate=1e-4`.
        needs_data: whether its data is read; else it may lack the source of it.

    Raises:
        CommandError: the file cannot be read, or a field is unknown, missing or of a wrong kind;
            the message begins with the line and column of that field.
    """
    name = str(file).removeprefix(PREFIX)
    is_ready = name in READY and not Path(file).is_file()
    text = ready_text(name) if is_ready or name != str(file) else _text(Path(file))
    written = parse_source(text, str(file))
    if is_ready:
        written = dataclasses.replace(
            written, origins=dataclasses.replace(written.origins, is_ready=True)
        )
    written = translated(written)
    written = with_overrides(written, overrides) if overrides else written
    return _checked(written if needs_data else _without_source(written))


def names_recipe(name: str) -> bool:
    """Whether a name is of a recipe: a file of YAML, or one that comes with Merak.

    Until the next release, that may be a bare name such as `gpt2`, where the hub has no such model.

    Args:
        name: as `--model`.

    Raises:
        CommandError: the hub has the model, and does not give it.
    """
    path = Path(name)
    if path.suffix in RECIPES or name.startswith(PREFIX):
        return True
    if name not in READY or path.exists() or find_hub_file(name, CONFIG_FILE) is not None:
        return False
    _warn_of_bare_name(name)
    return True


@functools.cache
def _warn_of_bare_name(name: str) -> None:
    logger.warning(
        "%s is taken for the recipe, since no model of this name is found: write %s%s, as from the "
        "next release on.",
        name,
        PREFIX,
        name,
    )


PREFIX = "recipe:"
"""Before the name of a recipe that comes with Merak, where a model's may stand."""


def _without_source(written: Written) -> Written:
    """The recipe for those who read no data: it may lack the source, but not the model."""
    sections = written.fields
    if not isinstance(sections, Mapping):
        return written
    model, data = sections.get("model"), sections.get("data")
    if isinstance(model, Mapping) and "name" in model and model["name"] is None:
        raise written.origins.error(
            ("model", "name"),
            "the recipe leaves its model to you; add --set model.name=FOLDER.",
        )
    if isinstance(data, Mapping) and data.get("source") is None:
        rest = {name: value for name, value in data.items() if name != "source"}
        return dataclasses.replace(written, fields={**sections, "data": rest})
    return written


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as cause:
        beside = [str(own) for own in file.parent.glob("*.y*ml")]
        meant = did_you_mean(str(file), beside if file.suffix else READY)
        raise CommandError(
            f"the recipe {file} cannot be read: {cause.strerror}"
            f"{meant if meant != '.' else '; merak recipes lists those that come with Merak.'}"
        ) from cause
    except UnicodeDecodeError as cause:
        where = " ".join(str(cause).split())
        raise CommandError(f"the recipe {file} is not YAML: {where}.") from cause


def parse_recipe(parsed: object) -> Recipe:
    """Check a recipe's content.

    Args:
        parsed: the mapping that a YAML file would hold.

    Raises:
        CommandError: a field is unknown, missing or of a wrong kind.
    """
    return _checked(Written(parsed, Origins()))


def _checked(written: Written) -> Recipe:
    origins = written.origins
    sections = _mapping((), written.fields, origins)
    problems: list[MerakError] = []
    data = sections.get("data")
    if isinstance(data, Mapping) and data.get("mix") and data.get("source"):
        sentence = "data.source and data.mix both name data; leave one of them out."
        problems.append(origins.error(("data", "mix"), sentence))
    for name in sections:
        if name not in NAMES:
            meant = _other_section(str(name)) or did_you_mean(str(name), NAMES)
            sentence = f"the recipe has no section {name!r}{meant}"
            problems.append(origins.error((str(name),), sentence))
    plan = sections.get("plan")
    found: dict[str, Any] = {}
    with collected(problems):
        _check_kind(("plan",), plan, str | None, origins)
        with origins.located():  # a plan file of another job is an error of its own
            found["parallel"] = _parallel(sections.get("parallel"), plan, origins)
    for name, (kind, _) in SECTIONS.items():
        is_left_out = name in FORMATS_OF_SECTIONS and sections.get(name) is None
        if name != "parallel" and not is_left_out:
            with collected(problems):
                found[name] = _section(kind, name, sections.get(name), origins)
    with collected(problems):
        arguments = _arguments(sections.get("arguments"), origins)
        found["arguments"] = arguments | ({} if plan is None else {"plan": plan})
    with collected(problems):
        found["lora"] = _lora(sections.get("lora"), origins)
    if problems:  # what is wrong besides is said with them
        with collected(problems), origins.located():
            _check_arguments(sections.get("arguments"))
        if "model" in found:
            with collected(problems), origins.located():
                model_of(found["model"])
    raise_all(problems)
    return Recipe(**found, plan=plan, origins=origins)


def model_of(own: ModelRecipe) -> ModelSource:
    """Find the class and config of a recipe's model.

    Args:
        own: section `model` of the recipe.

    Raises:
        CommandError: there is no such class, folder or field.
    """
    from merak.zoo.model_source import resolve_model

    return resolve_model(own.name, own.config, trust_remote_code=own.trust_remote_code)


def _check_arguments(parsed: object) -> None:
    """Check the values of arguments as a job of one rank would, before there is one.

    Raises:
        MerakError: some cannot be honoured.
    """
    from merak.arguments.draft import DraftArguments
    from merak.core.mesh import Mesh, pretended

    if not isinstance(parsed, Mapping):
        return
    known = {part.name for part in dataclasses.fields(DraftArguments)}
    given = {name: value for name, value in parsed.items() if name in known}
    if given.get("bf16") == AUTO_BF16:
        del given["bf16"]
    with pretended(Mesh(1, 1, 1, 0, torch.device("cpu"), None)):
        DraftArguments(**{"output_dir": "runs", **given})


def _parallel(parsed: object, plan: Any, origins: Origins) -> Degrees:
    """The degrees: those of the plan, where there is one, which the recipe may repeat."""
    given = _section(Degrees, "parallel", parsed, origins)
    problems: list[MerakError] = []
    for axis, degree in (given.axes() | {"ranks": given.ranks}).items():
        if degree is not None and degree < 1:
            sentence = f"parallel.{axis}={degree} is not a degree; use 1 or more."
            problems.append(origins.error(("parallel", axis), sentence))
    raise_all(problems)
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
    for axis, degree in _mapping(("parallel",), parsed, origins).items():
        if degree not in (None, planned.get(axis, degree)):
            sentence = (
                f"parallel.{axis}={degree} contradicts the plan {plan}, which has "
                f"{axis}={planned[axis]}; leave it out, or plan again."
            )
            problems.append(origins.error(("parallel", axis), sentence))
    raise_all(problems)
    return Degrees(**planned, elastic=given.elastic)


def _arguments(parsed: object, origins: Origins) -> dict[str, Any]:
    from merak.arguments import MerakArguments

    given = _mapping(("arguments",), parsed, origins)
    known = [part.name for part in dataclasses.fields(MerakArguments)]
    problems: list[MerakError] = []
    with collected(problems):
        _check_names("arguments", given, known, origins, accepted_arguments(known))
    if not given.get("output_dir"):
        sentence = "arguments.output_dir is missing; name the folder for the results."
        problems.append(origins.error(("arguments", "output_dir"), sentence))
    raise_all(problems)
    return dict(given)


def _lora(parsed: object, origins: Origins) -> dict[str, Any] | None:
    if parsed is None:
        return None
    given = _mapping(("lora",), parsed, origins)
    refuse_missing("peft", "the section lora of a recipe")
    from peft import LoraConfig

    hints = typing.get_type_hints(LoraConfig)
    known = [part.name for part in dataclasses.fields(LoraConfig)]
    problems: list[MerakError] = []
    with collected(problems):
        _check_names("lora", given, known, origins)
    for name in given.keys() & set(known):
        with collected(problems):
            _check_kind(("lora", name), given[name], hints[name], origins)
    raise_all(problems)
    return dict(given)


def _section(kind: type[Section], name: str, parsed: object, origins: Origins) -> Section:
    given = dict(_mapping((name,), parsed, origins))
    hints = typing.get_type_hints(kind)
    problems: list[MerakError] = []
    with collected(problems):
        _check_names(name, given, hints, origins)
    for part in dataclasses.fields(kind):  # type: ignore[arg-type]
        keys = (name, part.name)
        if part.name in given:
            value = given[part.name] = part.metadata.get("reads", _as_it_is)(given[part.name])
            with collected(problems):
                _check_kind(keys, value, hints[part.name], origins)
                _check_value(keys, value, part.metadata, origins)
        elif part.default is part.default_factory is dataclasses.MISSING:
            sentence = (
                f"{name}.{part.name} is missing from the recipe; write it there, or give "
                f"{name}.{part.name}=… on the command line."
            )
            problems.append(origins.error(keys, sentence))
    raise_all(problems)
    return kind(**given)


def _as_it_is(value: Any) -> Any:
    return value


def _check_names(
    section: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    origins: Origins,
    suggested: Iterable[str] = (),
) -> None:
    names, problems = list(known), list[MerakError]()
    for name in given:
        if name not in names:
            former = todays_name(str(name), FORMER.get(section, {}))
            meant = former or did_you_mean(str(name), list(suggested) or names)
            if meant == ".":
                meant = _other_section(str(name)) or meant
            sentence = f"{section} has no field {name!r}{meant}"
            problems.append(origins.error((section, str(name)), sentence))
    raise_all(problems)


def _other_section(name: str) -> str | None:
    """Return the end of a sentence about a field that stands in a wrong section."""
    field = field_named(name)
    return field and f"; it is a field of {field.partition('.')[0]}: {field}."


def field_named(name: str) -> str | None:
    """Find a field of a recipe by its own name; that of a section stands for its first field.

    Args:
        name: such as "max_steps", for which the field is "arguments.max_steps".
    """
    from merak.arguments import MerakArguments

    kinds: dict[str, Any] = {section: kind for section, (kind, _) in SECTIONS.items()}
    for section, kind in {**kinds, "arguments": MerakArguments}.items():
        names = [part.name for part in dataclasses.fields(kind)]
        if name in (section, *names):
            return f"{section}.{names[0] if name == section else name}"
    return None


def _check_kind(keys: tuple[str, ...], value: object, hint: Any, origins: Origins) -> None:
    if fits(value, hint):
        return
    name = ".".join(keys)
    if value is None:
        raise origins.error(
            keys, f"{name} has no value; write one there, or give {name}=… on the command line."
        )
    kinds = " or ".join(kind_names(hint))
    raise origins.error(keys, f"{name}={value!r} should be {kinds}.")


def _check_value(
    keys: tuple[str, ...], value: Any, checks: Mapping[str, Any], origins: Origins
) -> None:
    name = ".".join(keys)
    if value is None:
        return
    choices = checks.get("choices")
    if choices is not None and value not in choices:
        meant = did_you_mean(str(value), choices)
        fix = meant if meant != "." else f"; use one of {', '.join(choices)}."
        raise origins.error(keys, f"{name}={value!r} is not known{fix}")
    least, most = checks.get("least"), checks.get("most")
    if least is not None and value < least:
        raise origins.error(keys, f"{name}={value} is too small; use {least} or more.")
    if most is not None and not value <= most:
        raise origins.error(keys, f"{name}={value} is too large; use {most} or less.")


def _mapping(keys: tuple[str, ...], parsed: object, origins: Origins) -> Mapping[str, Any]:
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        name = ".".join(keys) or "the recipe"
        raise origins.error(keys, f"{name} should hold named fields, not {parsed!r}.")
    return parsed

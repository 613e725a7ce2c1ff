"""Requests of commands: frozen dataclasses whose fields become the options of the command line.

A field says its flag, its placeholder and its help (`option`), or takes those of an option of
`merak.plan.options` (`shared`), or is several of these (`job_options`). `takes` makes a typer
command of a function of one request.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from merak.core.errors import ArgumentsError, CommandError
from merak.core.files.json_file import parse_value
from merak.plan import options
from merak.schedule.registry import names as schedules

Request = TypeVar("Request")

_TYPER = "typer"
_JOB = "job options"
_GIVEN, _CONTEXT = "given", "context"


def words(known: Iterable[object]) -> dict[str, Any]:
    """Settings of an option or argument whose values a shell can complete.

    Args:
        known: the values.
    """
    names = list(map(str, known))
    return {"autocompletion": lambda incomplete: [n for n in names if n.startswith(incomplete)]}


def option(default: Any, flag: str, placeholder: str, help: str, **settings: Any) -> Any:
    """Field of a request that is an option of a command.

    Args:
        default: its value where the option is not given; MISSING for an option that must be.
        flag: such as "--seq".
        placeholder: what `--help` shows for the value; empty for a flag.
        help: a sentence.
        **settings: of `typer.Option`.
    """
    made = typer.Option(flag, help=help, metavar=placeholder or None, **settings)
    return field(default=default, metadata={_TYPER: made})


def shared(name: str) -> Any:
    """Field of a request that is an option of `merak.plan.options.ParallelOptions`.

    Args:
        name: of the option.
    """
    own = options.declared(name)
    return field(default=own.default, metadata={_TYPER: _typer_option(name)})


def _pairs(flag: str, typed: list[str] | None) -> dict[str, Any]:
    return dict(read_pair(flag, own) for own in typed or ())


def _sizes(flag: str, typed: str | None) -> tuple[int, ...] | None:
    try:
        return None if typed is None else tuple(map(int, typed.replace(",", " ").split()))
    except ValueError:
        raise CommandError(
            f"{flag} {typed} is no list of whole numbers; use such as 5,7,7,7."
        ) from None


_WRITTEN: Mapping[str, tuple[Any, str, str, Callable[[str, Any], Any]]] = MappingProxyType(
    {
        "schedule_options": (
            list[str] | None,
            "KEY=VALUE",
            "Option of the schedule, such as chunks=2; may be repeated.",
            _pairs,
        ),
        "partition": (
            str | None,
            "N,…",
            "Segments of every stage, such as 5,7,7,7; balanced if unset.",
            _sizes,
        ),
    }
)
"""Options that are typed in another form: type, placeholder, help, and how it is read."""


def job_options(*names: str, is_open: bool = False) -> Any:
    """Field of a request that is several options of `ParallelOptions`: their values, by name.

    Args:
        names: of the options.
        is_open: whether one that the command line leaves out is None, for a search to choose.
    """
    defaults = {name: None if is_open else options.declared(name).default for name in names}
    typed = {name: _typer_option(name, is_open) for name in names}
    return field(default_factory=lambda: dict(defaults), metadata={_JOB: typed})


def _typer_option(name: str, is_open: bool = False) -> Any:
    """The flag of an option of `ParallelOptions`."""
    own, flag = options.declared(name), flag_of(name)
    help, placeholder = own.metadata["help"], own.metadata["placeholder"]
    if name in _WRITTEN:
        _, placeholder, help, _ = _WRITTEN[name]
    if is_open and options.is_searched(name):
        help = f"{help.partition(' If unset')[0]} Pinned; else it is searched."
    settings = words(schedules() if name == "schedule" else own.metadata["choices"])
    if name in options.READS:
        is_number = name in options.RANGES
        settings = {"parser": partial(_read, flag, options.READS[name], is_number)}
    if isinstance(own.default, bool):
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return typer.Option(flag, help=help, metavar=placeholder or None, **settings)


def flag_of(name: str) -> str:
    """The flag of an option of `ParallelOptions`.

    Args:
        name: of the option.
    """
    return str(options.declared(name).metadata["flag"]) or "--" + name.replace("_", "-")


def _hint(name: str) -> Any:
    """The type of what is typed for an option of `ParallelOptions`."""
    hint = typing.get_type_hints(options.ParallelOptions)[name]
    if name in _WRITTEN:
        return _WRITTEN[name][0]
    numbers = [own for own in (bool, int, float) if hint in (own, own | None)]
    return (hint if name in options.READS else (*numbers, str)[0]) | None


def _value(name: str, typed: Any) -> Any:
    """The value of an option of `ParallelOptions`, checked; None for none.

    Raises:
        CommandError: it is none.
    """
    flag = flag_of(name)
    value = _WRITTEN[name][-1](flag, typed) if name in _WRITTEN else typed
    for problem in () if value is None else options.option_problems(name, value, f"{flag} "):
        raise CommandError(problem)
    return value


def read_pair(flag: str, typed: str) -> tuple[str, Any]:
    """Name and value of a setting that is typed as KEY=VALUE.

    Args:
        flag: before it.
        typed: the setting.

    Raises:
        CommandError: it is none.
    """
    key, equals, value = typed.partition("=")
    if not key or not equals:
        raise CommandError(f"{flag} {typed} is not of the form KEY=VALUE.")
    return key, parse_value(value)


def _read(flag: str, read: Callable[[object], object], is_number: bool, text: str) -> Any:
    try:
        value = read(text)
    except ArgumentsError as error:
        raise CommandError(
            str(error).replace(f"{flag[2:].replace('-', '_')}=", f"{flag} ")
        ) from error
    if is_number and isinstance(value, str):
        raise CommandError(f"{flag} {text} is no number of bytes; use such as 80GB or 80GiB.")
    return value


def given() -> Any:
    """Field of a request that is no option: the names of its fields that the command line gives."""
    return field(default=frozenset())


def recipe_settings() -> Any:
    """Field of a request whose model may be a recipe's: fields of it that are changed."""
    return option(
        (), "--set", "FIELD=VALUE", "Change a field of the recipe that --model names; repeatable."
    )


def argument(default: Any, placeholder: str, help: str, **settings: Any) -> Any:
    """Field of a request that is a positional argument of a command.

    Args:
        default: its value where it is not given; MISSING for one that must be.
        placeholder: what `--help` calls it.
        help: a sentence.
        **settings: of `typer.Argument`.
    """
    made = typer.Argument(metavar=placeholder, help=help, **settings)
    return field(default=default, metadata={_TYPER: made})


class ModelCommand(TyperCommand):
    """Command with `--model`, whose flag may be left out before a model or recipe."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; a word that belongs to no option is the model.

        Args:
            ctx: of the command.
            args: words after the command.
        """
        options, words, _ = self.make_parser(ctx).parse_args(args=list(args))
        if words and "model" not in options:
            if len(words) > 1:
                ctx.fail(f"Got an unexpected extra argument {words[1]!r}")
            ctx.allow_extra_args = True
            ctx.default_map = {**(ctx.default_map or {}), "model": words[0]}
        return super().parse_args(ctx, args)


def takes(kind: type[Request]) -> Callable[[Callable[[Request], None]], Callable[..., None]]:
    """Decorator of a command: its options are the fields of the request that it takes.

    Args:
        kind: a dataclass of fields that the functions here have made.
    """
    hints = typing.get_type_hints(kind)

    def decorated(command: Callable[[Request], None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            context = values.pop(_CONTEXT, None)
            if context is not None:
                values[_GIVEN] = _given_names(context, values)
            for one in job:
                names = one.metadata[_JOB]
                values[one.name] = {name: _value(name, values.pop(name)) for name in names}
            command(kind(**values))

        job = [one for one in fields(kind) if _JOB in one.metadata]  # type: ignore[arg-type]
        parameters = []
        for one in fields(kind):  # type: ignore[arg-type]
            if _TYPER in one.metadata:
                typed = one.metadata[_TYPER]
                parameters.append(_parameter(one.name, one.default, hints[one.name], typed))
            elif _JOB in one.metadata:
                given = one.default_factory()  # type: ignore[operator]
                for name, typed in one.metadata[_JOB].items():
                    parameters.append(_parameter(name, given[name], _hint(name), typed))
        if _GIVEN in hints:
            parameters.append(_context_parameter())
        called.__doc__, called.__name__ = command.__doc__, command.__name__
        called.__annotations__ = {}
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters
        )
        return called

    return decorated


def _given_names(context: typer.Context, values: Iterable[str]) -> frozenset[str]:
    sources = {name: context.get_parameter_source(name) for name in values}
    return frozenset(
        name for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )


def _context_parameter() -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(_CONTEXT, kind, annotation=typer.Context)


def _parameter(name: str, default: Any, hint: Any, typed: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[hint, typed],
    )


def check_counts(request: Any, *names: str) -> None:
    """Refuse options of a request that are below 1.

    Args:
        request: made by a command.
        *names: of its fields that are counts; None is left to a default.

    Raises:
        CommandError: one is.
    """
    for one in (one for one in fields(request) if one.name in names):
        value = getattr(request, one.name)
        if value is not None and value < 1:
            flag = one.metadata[_TYPER].default  # which stands first, as in `Annotated`
            raise CommandError(f"{flag} {value} is too few; use 1 or more.")


def parameter_dtype() -> Any:
    """Field of a request for the type of the parameters; None for the model's own."""
    return option(
        None, "--dtype", "TYPE", "Of the parameters, such as bf16; that of the config or recipe."
    )


def autocast() -> Any:
    """Field of a request for the type of autocast; None for the recipe's, or none."""
    return option(None, "--autocast", "TYPE", "What bf16 and fp16 train with: bf16, fp16, or off.")


def json_output() -> Any:
    """Field of a request that asks for JSON."""
    return option(False, "--json", "", "Print one JSON object on standard output, nothing else.")


def backend() -> Any:
    """Field of a request for the backend of the process groups."""
    return option(None, "--backend", "gloo|nccl", "The backend that carries tensors between ranks.")


def device() -> Any:
    """Field of a request for the device that ranks compute on."""
    return option(None, "--device", "cpu|cuda", "Where ranks compute; what the machine has.")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Request about a model by name, or that of a recipe."""

    model: str = option(
        MISSING,
        "--model",
        "M",
        "transformers class, a name of the hub, a folder or file with a config.json, or a recipe.",
    )
    settings: list[str] = recipe_settings()
    config: str | None = option(
        None, "--config", "JSON", "Fields of the config to change, as an object."
    )
    sequence: int | None = option(
        None, "--seq", "S", "Tokens of a sequence; the model's longest, up to 512."
    )
    trust_remote_code: bool = option(
        False, "--trust-remote-code", "", "Run code that is in the model's folder."
    )
    as_json: bool = json_output()
    given: frozenset[str] = given()


@dataclass(frozen=True, kw_only=True)
class TypedRequest(ModelRequest):
    """Request about a model in the types that it trains in."""

    dtype: str | None = parameter_dtype()
    autocast: str | None = autocast()


@dataclass(frozen=True, kw_only=True)
class LayoutRequest(ModelRequest):
    """Request about a model on dp × cp × tp × pp ranks."""

    dp: int = option(1, "--dp", "D", "Data parallel degree.")
    tp: int = option(1, "--tp", "T", "Tensor parallel degree.")
    pp: int = option(1, "--pp", "P", "Pipeline parallel degree.")
    cp: int = option(1, "--cp", "C", "Context parallel degree: ranks that share tokens.")
    ep: int = option(1, "--ep", "E", "Expert parallel degree: that of tp, or of replicas.")
    device: str | None = device()


@dataclass(frozen=True, kw_only=True)
class JobRequest(LayoutRequest):
    """Request about a job that trains a model in microbatches of some samples."""

    batch: int = option(1, "--batch", "B", "Samples of a microbatch.")
    microbatches: int = option(1, "--microbatches", "M", "Microbatches of a step.")

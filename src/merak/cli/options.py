"""Requests of commands: frozen dataclasses whose fields become the options of the command line.

A field says its flag, its placeholder and its help (`option`), or takes the default and the help of
an option of `merak.plan.options` (`shared`). `takes` makes a typer command of a function of one
request.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from merak.launch.errors import CommandError
from merak.plan import options
from merak.plan.cluster.hierarchy import HIERARCHIES
from merak.plan.gradient_compression import COMPRESSIONS
from merak.schedule.registry import names as schedules

Request = TypeVar("Request")

_TYPER = "typer"
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


def shared(name: str, flag: str = "") -> Any:
    """Field of a request that is an option of `merak.plan.options.ParallelOptions`.

    Args:
        name: of the option.
        flag: its flag; by default the name with dashes.
    """
    own = options.taken(name)
    flag = flag or "--" + name.replace("_", "-")
    settings = words(schedules() if name == "schedule" else own.metadata.get("choices", ()))
    if name in options.READS:
        settings = {"parser": partial(_read, flag, options.READS[name])}
    return option(own.default, flag, options.placeholder(name), own.metadata["help"], **settings)


def _read(flag: str, read: Callable[[object], object], text: str) -> Any:
    value = read(text)
    if isinstance(value, str):
        raise CommandError(f"{flag} {text} is no number of bytes; use such as 80GB or 80GiB.")
    return value


def check_reductions(kind: str, hierarchy: str, tied: str) -> None:
    """Refuse words that say nothing about how gradients are reduced.

    Args:
        kind: of compression, as it was typed.
        hierarchy: of reductions, as it was typed.
        tied: when gradients of tied parameters are exchanged, as it was typed.

    Raises:
        CommandError: one is none.
    """
    if hierarchy not in HIERARCHIES:
        raise CommandError(
            f"--hierarchical-reductions {hierarchy} is no choice; use "
            f"{', '.join(HIERARCHIES[:-1])} or {HIERARCHIES[-1]}."
        )
    times = options.taken("tied_gradients").metadata["choices"]
    if tied not in times:
        raise CommandError(f"--tied-gradients {tied} is no time; use {' or '.join(times)}.")
    if kind not in COMPRESSIONS:
        raise CommandError(
            f"--gradient-compression {kind} is no compression; use {', '.join(COMPRESSIONS[:-1])} "
            f"or {COMPRESSIONS[-1]}."
        )


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


def takes(kind: type[Request]) -> Callable[[Callable[[Request], None]], Callable[..., None]]:
    """Decorator of a command: its options are the fields of the request that it takes.

    Args:
        kind: a dataclass of fields that `option`, `shared` and `argument` have made.
    """
    hints = typing.get_type_hints(kind)

    def decorated(command: Callable[[Request], None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            context = values.pop(_CONTEXT, None)
            if context is not None:
                values[_GIVEN] = _given_names(context, values)
            command(kind(**values))

        own = [one for one in fields(kind) if _TYPER in one.metadata]  # type: ignore[arg-type]
        parameters = [_parameter(one, hints[one.name]) for one in own]
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


def _parameter(own: Field[Any], hint: Any) -> inspect.Parameter:
    return inspect.Parameter(
        own.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if own.default is MISSING else own.default,
        annotation=Annotated[hint, own.metadata[_TYPER]],
    )


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
    """Request about a model by name, and the shape of a microbatch of it."""

    model: str = option(
        MISSING,
        "--model",
        "M",
        "transformers class name, a folder or file with a config.json, or a recipe.",
    )
    settings: list[str] = recipe_settings()
    config: str | None = option(
        None, "--config", "JSON", "Fields of the config to change, as an object."
    )
    batch: int = option(1, "--batch", "B", "Samples of a microbatch.")
    sequence: int | None = option(
        None, "--seq", "S", "Tokens of a sequence; the model's longest, up to 512."
    )
    sequence_parallel: bool = shared("sequence_parallel")
    trust_remote_code: bool = option(
        False, "--trust-remote-code", "", "Run code that is in the model's folder."
    )
    as_json: bool = json_output()
    given: frozenset[str] = given()


@dataclass(frozen=True, kw_only=True)
class JobRequest(ModelRequest):
    """Request about a job that trains a model on dp × cp × tp × pp ranks."""

    dp: int = option(1, "--dp", "D", "Data parallel degree.")
    tp: int = option(1, "--tp", "T", "Tensor parallel degree.")
    pp: int = option(1, "--pp", "P", "Pipeline parallel degree.")
    cp: int = option(1, "--cp", "C", "Context parallel degree: ranks that share tokens.")
    ep: int = option(1, "--ep", "E", "Expert parallel degree: that of tp, or of replicas.")
    schedule: str = shared("schedule")
    microbatches: int = option(1, "--microbatches", "M", "Microbatches of a step.")
    device: str | None = device()

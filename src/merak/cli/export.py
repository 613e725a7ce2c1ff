"""`merak export`: the Hugging Face folder of a checkpoint, in one process."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merak.cli.model import parameter_type
from merak.cli.options import argument, json_output, option, takes
from merak.cli.output import show, stdout_to_stderr
from merak.core.errors import CommandError
from merak.core.precision import PARAMETER_TYPES
from merak.core.units import count, read_bytes, size

if TYPE_CHECKING:
    import torch

    from merak.checkpoint.pretrained.export import Exported

PRETRAINED, DCP = "pretrained", "dcp"
"""Formats of a folder: what from_pretrained reads, and torch's distributed checkpoint."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Report of an export.

    Args:
        folder: that was written.
        files: names of its files.
        parameters: elements of all tensors in them.
        bytes: of all files.
        seconds: that it took.
    """

    folder: str
    files: list[str]
    parameters: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Request to export a checkpoint."""

    checkpoint: str = argument(
        MISSING,
        "CHECKPOINT",
        "A checkpoint-… folder, of any layout, or the URL of one; with --merge also a model's own; "
        "with --base alone one of torch.distributed.checkpoint.",
    )
    out: Path = argument(MISSING, "OUT", "The folder to write.")
    max_shard_size: str | None = option(
        None, "--max-shard-size", "SIZE", "Most of a file, such as 5GB; files as in the checkpoint."
    )
    dtype: str | None = option(
        None, "--dtype", "|".join(PARAMETER_TYPES), "Type of floating point tensors; their own."
    )
    format: str = option(
        PRETRAINED,
        "--format",
        f"{PRETRAINED}|{DCP}",
        "Folder that from_pretrained reads, or one of torch.distributed.checkpoint, by the names "
        "of the model's state dict.",
    )
    merge: bool = option(
        False, "--merge", "", "Of adapters: write the whole model, with them merged into it."
    )
    base: str | None = option(
        None,
        "--base",
        "M",
        "With --merge, the model that the adapters were trained beside: a folder, or a name of the "
        "hub; the one that they name. Of a folder of torch.distributed.checkpoint, the model whose "
        "weights it has.",
    )
    average: bool = option(
        False, "--average", "", "The moving averages that ema_decay has kept, in place of weights."
    )
    overwrite: bool = option(
        False, "--overwrite", "", "Replace the model in a folder that is not empty."
    )
    as_json: bool = json_output()


@takes(ExportRequest)
def export(request: ExportRequest) -> None:
    """Export a checkpoint as a folder that from_pretrained reads.

    Needs one process, no accelerator, and memory for one tensor, or with --merge for the model.
    Checks the files first.
    """
    with stdout_to_stderr():
        report = export_report(request)
    show(report, _page, request.as_json)


def export_report(request: ExportRequest) -> ExportReport:
    """Export a checkpoint.

    Args:
        request: what to export, and where to.

    Raises:
        CommandError: a size or type that is none.
        WeightsError: as of `merak.checkpoint.pretrained.export.export_checkpoint`, and
            `merged.export_merged` beside it.
    """
    options: dict[str, Any] = {
        "max_shard_size": _num_bytes(request.max_shard_size),
        "dtype": _dtype(request.dtype),
        "overwrite": request.overwrite,
    }
    from merak.checkpoint.pretrained.export import is_of_model
    from merak.checkpoint.remote.fetching import opened

    started = time.perf_counter()
    with opened(request.checkpoint, lambda name: request.average or is_of_model(name)) as folder:
        found = _exported(request, folder, options)
    seconds = time.perf_counter() - started
    return ExportReport(
        str(request.out), list(found.files), found.parameters, found.num_bytes, seconds
    )


def _exported(request: ExportRequest, checkpoint: Path, options: dict[str, Any]) -> Exported:
    """Export a checkpoint whose files are on this host."""
    from merak.checkpoint.pretrained.dcp import export_dcp, export_from_dcp, is_dcp
    from merak.checkpoint.pretrained.export import export_checkpoint
    from merak.checkpoint.pretrained.merged import export_merged

    out, is_from_dcp = request.out, is_dcp(checkpoint)
    _check_words(request, is_from_dcp)
    if is_from_dcp:
        return export_from_dcp(checkpoint, out, _make_model(str(request.base)), **options)
    options["average"] = request.average
    if request.merge:
        return export_merged(checkpoint, out, _load_base, request.base, **options)
    if request.format == DCP:
        options.pop("max_shard_size")
        return export_dcp(checkpoint, out, **options)
    return export_checkpoint(checkpoint, out, **options)


def _check_words(request: ExportRequest, is_from_dcp: bool) -> None:
    """Refuse options that do not go together.

    Raises:
        CommandError: there are such.
    """
    if request.format not in (PRETRAINED, DCP):
        raise CommandError(f"--format {request.format} is none; use {PRETRAINED} or {DCP}.")
    if is_from_dcp and (request.merge or request.average or request.format == DCP):
        raise CommandError(
            f"{request.checkpoint} is a folder of torch.distributed.checkpoint, which is exported "
            "as a folder that from_pretrained reads; leave --merge, --average and --format out."
        )
    if is_from_dcp and request.base is None:
        raise CommandError(
            f"{request.checkpoint} is a folder of torch.distributed.checkpoint, which does not "
            "name its model; give its folder, or its name on the hub, with --base."
        )
    if request.base is not None and not request.merge and not is_from_dcp:
        raise CommandError(f"--base {request.base} is for --merge; add it, or leave --base out.")
    if request.format == DCP and (request.merge or request.max_shard_size is not None):
        raise CommandError(
            f"--format {DCP} writes the weights as the checkpoint has them; leave --merge and "
            "--max-shard-size out."
        )


def _make_model(name: str) -> Any:
    """The model of a folder, or of the hub, with weights of its own."""
    from merak.zoo.model_source import resolve_model

    source = resolve_model(name)
    return source.model_class(source.config)


def _load_base(name: str) -> Any:
    """The model of a folder, or of the hub, with its weights."""
    from merak.zoo.hub import first_words
    from merak.zoo.model_source import resolve_model

    source = resolve_model(name)
    if source.weights is None:
        raise CommandError(
            f"{name} has no weights that adapters could be merged into; give the folder of the "
            "model that they were trained beside, or its name on the hub, with --base."
        )
    try:
        return source.model_class.from_pretrained(
            source.weights, config=source.config, dtype="auto"
        )
    except OSError as cause:
        raise CommandError(f"{name} cannot be read: {first_words(cause)}.") from cause


def _num_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    num_bytes = read_bytes(text)
    if not isinstance(num_bytes, int) or not num_bytes or text.strip().isdecimal():
        raise CommandError(
            f"--max-shard-size {text} is no size of a file; use such as 5GB or 500MB."
        )
    return num_bytes


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    return parameter_type("--dtype", name)


def _page(report: ExportReport) -> str:
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    return (
        f"{report.folder}: {files}, {count(report.parameters)} parameters, {size(report.bytes)}, "
        f"in {report.seconds:.1f} s"
    )

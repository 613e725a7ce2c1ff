"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="M",
        help="transformers class name, or a folder or file with a config.json.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="JSON", help="Fields of the config to change, as an object."),
]
Batch = Annotated[int, typer.Option("--batch", metavar="B", help="Samples of a microbatch.")]
Sequence = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="S", help="Tokens of a sequence; the model's longest, up to 512."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", metavar="gloo|nccl", help="What carries tensors between ranks."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="Where ranks compute; what the machine has."),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Trace anew, and keep nothing for the next time.")
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="Tensor parallel ranks hold shares of the sequence between split products.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that is in the model's folder.")
]

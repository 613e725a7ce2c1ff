"""Training arguments: `MerakArguments`, and what becomes of every field of transformers' own."""

from merak.arguments.single_process import single_process_accelerate
from merak.arguments.training import (
    MerakArguments,
    MerakSeq2SeqArguments,
    argument_problem,
    arguments_for,
    check_arguments,
    default_trace_cache,
    refuse_different_arguments,
)

__all__ = [
    "MerakArguments",
    "MerakSeq2SeqArguments",
    "argument_problem",
    "arguments_for",
    "check_arguments",
    "default_trace_cache",
    "refuse_different_arguments",
    "single_process_accelerate",
]

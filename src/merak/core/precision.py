"""Precision of a device: whether it supports a type of autocast."""

from __future__ import annotations

import torch

from merak.core.errors import ArgumentsError

PARAMETER_TYPES = ("float32", "bfloat16", "float16")
"""Names of the types that parameters are trained in."""

_SHORT_TYPES = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}


def read_type(written: object) -> object:
    """Read the name of a type of parameters as people write it: "bf16" is "bfloat16".

    Args:
        written: a text, or a type of torch; anything else, and a text that is no name of one, is
            given back as it is.
    """
    if not isinstance(written, (str, torch.dtype)):
        return written
    name = str(written).strip().lower().removeprefix("torch.")
    name = _SHORT_TYPES.get(name, name)
    return name if name in PARAMETER_TYPES else written


def unsupported(autocast: torch.dtype | None, device: torch.device) -> str | None:
    """Explain why a device cannot run autocast of a type, in a sentence; None if it can.

    Args:
        autocast: the type; None for none.
        device: where the model runs.
    """
    if autocast is None:
        return None
    if autocast not in (torch.bfloat16, torch.float16):
        return (
            f"autocast={autocast} is no precision to train in; use torch.bfloat16 or torch.float16."
        )
    if device.type != "cuda" or autocast != torch.bfloat16:
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has no bfloat16; train in float16 (fp16=True, or autocast=torch.float16)."


def check_autocast(autocast: torch.dtype | None, device: torch.device) -> None:
    """Refuse a precision that the device lacks.

    Raises:
        ArgumentsError: it does.
    """
    problem = unsupported(autocast, device)
    if problem is not None:
        raise ArgumentsError(problem)

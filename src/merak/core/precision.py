"""Autocast of a job: whether its device supports the type, and whether another is around it."""

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


def refuse_autocast_around(autocast: torch.dtype | None, device: torch.device) -> None:
    """Refuse a `torch.autocast` around a call of the engine that is not the job's own.

    The graph has the conversions of the job's autocast; those of another would change the types of
    what stages send each other, and float16 would have no loss scale.

    Args:
        autocast: of the job; None for none.
        device: where its model runs.

    Raises:
        ArgumentsError: there is one.
    """
    if not torch.is_autocast_enabled(device.type):
        return
    around = torch.get_autocast_dtype(device.type)
    if around == autocast:
        return
    own = "without autocast" if autocast is None else f"with autocast={autocast}"
    argument = {torch.bfloat16: " (bf16=True)", torch.float16: " (fp16=True)"}.get(around, "")
    scaled = ", which scales the loss too" if around == torch.float16 else ""
    raise ArgumentsError(
        f"torch.autocast({device.type!r}, {around}) is around this call, but the model is laid out "
        f"{own}; take that context away, and give merak.parallelize autocast={around}, or the "
        f"trainer's arguments the same{argument}{scaled}."
    )


def refuse_inference_mode() -> None:
    """Refuse to train within `torch.inference_mode`, which records no gradients and lets none in.

    Raises:
        ArgumentsError: it is around this call.
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentsError(
            "torch.inference_mode() is around this call, in which no tensor has a gradient, so "
            "that nothing would be trained; take that context away (evaluate may run in it)."
        )

"""A reference model beside the one that is trained: frozen, in the same stages, in no file.

A teacher is a frozen submodule of the model (see `merak.average_teacher`), and so is a reference
here: it is traced, cut, sharded and counted with the model. What TRL keeps apart stays apart: its
mode, and the state dict.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from merak.engine.parameters.teacher import average_teacher

NAME = "reference"
"""Of the submodule that holds it."""


class Reference(nn.Module):
    """Holds a frozen module in eval mode, whatever mode the model around it is set to.

    Args:
        module: which is frozen.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Reference:
        """Leave it in eval mode."""
        return self


def hold_reference(model: nn.Module, reference: nn.Module) -> None:
    """Make a frozen module a part of a model, and of none of its state dicts.

    Args:
        model: that is trained; what an earlier trainer has put there is replaced.
        reference: called by the loss.
    """
    held = model._modules.get(NAME)
    if held is None:
        model.register_state_dict_post_hook(_without_reference)
    if not isinstance(held, Reference) or held.module is not reference:
        model.add_module(NAME, Reference(reference))


def _without_reference(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{NAME}.")]:
        del state[key]


class SyncReference(TrainerCallback):
    """Moves the reference towards the model every `ref_model_sync_steps` steps, as TRL's does."""

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Average the reference."""
        assert model is not None
        if state.global_step % args.ref_model_sync_steps == 0:
            average_teacher(model, f"{NAME}.module", "", 1.0 - args.ref_model_mixup_alpha)

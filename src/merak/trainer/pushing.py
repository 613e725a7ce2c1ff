"""The hub: rank 0 pushes, and if it cannot, every rank raises the reason."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0, failing_together

_PUSH = "push to the hub"


class Pushing(Trainer):
    """The part of `MerakTrainer` that talks to the hub."""

    mesh: Mesh
    hub_model_id: Any

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository on the hub, which all ranks then know.

        Args:
            *args: as of transformers.
            **kwargs: as of transformers.
        """

        def make() -> str | None:
            super(Pushing, self).init_hf_repo(*args, **kwargs)
            name: str | None = self.hub_model_id
            return name

        self.hub_model_id = decide_on_rank0(self.mesh, "making the hub's repository", make)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model, which all ranks do together, and push it from rank 0.

        Args:
            *args: as of transformers.
            **kwargs: as of transformers.

        Returns:
            As of transformers; None on other ranks.
        """
        with failing_together(self.mesh, _PUSH):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with failing_together(self.mesh, _PUSH):
            super()._push_from_checkpoint(checkpoint_folder)

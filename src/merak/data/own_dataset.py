"""Stand-ins for the user's dataset in a rank's loader, with the dataset's attributes.

A callback that reads or sets an attribute of `train_dataloader.dataset`, such as the difficulty of
a curriculum, means the user's own.
"""

from __future__ import annotations

from typing import Any, ClassVar

_OF_LOADERS = ("state_dict", "load_state_dict")
"""Methods by which loaders would keep the state of the dataset, which is that of the batches."""


class StandsForDataset:
    """Gives and sets attributes of the user's dataset, but for those of its own."""

    own_names: ClassVar[frozenset[str]] = frozenset()
    dataset: Any

    def __getattr__(self, name: str) -> Any:
        """An attribute of the user's dataset; asked for what is not this object's own."""
        if name[:2] == "__" or name in self.own_names or name in _OF_LOADERS:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's dataset, or one of this object's own."""
        if name in self.own_names:
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

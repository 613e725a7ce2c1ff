"""A view of the model for transformers' optimizers: this rank's parameters alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn


class LocalParameters(nn.Module):
    """A view of a model with this rank's parameters alone, under their own names.

    Args:
        parameters: by name, as the engine has them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._local = dict(parameters)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; arguments as of torch's, without effect on a flat view."""
        for name, parameter in self._local.items():
            yield prefix + name, parameter

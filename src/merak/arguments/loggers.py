"""Loggers of `report_to`: checks that they are known and installed."""

from __future__ import annotations

from collections.abc import Iterator

from transformers.integrations import integration_utils

from merak.arguments.fields import TrainingFields
from merak.core.errors import did_you_mean

NEEDS = {"azure_ml": "azureml", "flyte": "flytekit"}
"""Packages that loggers import, where the logger has another name."""

PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}
"""Distributions to install for loggers, where the package has another name."""


def logger_problems(arguments: TrainingFields) -> Iterator[str]:
    """Yield a sentence for every logger that is unknown or not installed."""
    known = integration_utils.INTEGRATION_TO_CALLBACK
    wanted = arguments.report_to or []
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name in ("all", "none"):
            continue  # all that are installed; or, among others, refused by transformers
        if name not in known:
            known_names = did_you_mean(name, [*known, "none"])
            yield f"report_to={name!r} is no logger of transformers{known_names}"
        elif not _is_installed(name):
            package = PACKAGES.get(name, name)
            yield (
                f"report_to={name!r} needs the package {package}, which is not installed; run "
                f"`pip install {package}`, or use report_to='none'."
            )


def _is_installed(name: str) -> bool:
    """Whether a logger's package is installed, as transformers itself finds out."""
    ask = getattr(integration_utils, f"is_{NEEDS.get(name, name)}_available", None)
    if ask is None and name == "comet_ml":
        return bool(getattr(integration_utils, "_is_comet_installed", True))
    return True if ask is None else bool(ask())

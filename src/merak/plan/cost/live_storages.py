"""Bytes of live storages while something runs; see `merak.core.storages`."""

from merak.core.storages import Storages

__all__ = ["Storages"]

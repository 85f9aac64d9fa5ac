"""The two runners: in-process (`load`, `DynamicBatcher`), and mctl-runner."""

from typing import TYPE_CHECKING

from ..bundle_format.errors import (
    BundleError,
    ClosedError,
    ContractError,
    DeadlineError,
    HostError,
    MctlError,
    ModelError,
    QueueFullError,
    ServeError,
)

if TYPE_CHECKING:
    from .batcher import DynamicBatcher
    from .session import Session, load

__all__ = [
    "BundleError",
    "ClosedError",
    "ContractError",
    "DeadlineError",
    "DynamicBatcher",
    "HostError",
    "MctlError",
    "ModelError",
    "QueueFullError",
    "ServeError",
    "Session",
    "load",
]


def __getattr__(name: str) -> object:
    """Imports torch at the first use, not with the package: `mctl serve` does without."""
    if name == "DynamicBatcher":
        from .batcher import DynamicBatcher

        return DynamicBatcher
    if name in ("Session", "load"):
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")

"""Is this machine, this allocation fit to train, and what is fast on it: `fairlead doctor` and `fairlead bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairlead_diagnostics.checking import Bench, Check, Requested, Result

if TYPE_CHECKING:
    from fairlead_diagnostics.bench.scaling import validate_scaling

__all__ = ["Bench", "Check", "Requested", "Result", "validate_scaling"]


def __getattr__(name: str) -> Any:
    """`validate_scaling` on its first use: a plugin of this package is loaded without the launcher."""
    if name != "validate_scaling":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairlead_diagnostics.bench.scaling import validate_scaling

    return validate_scaling

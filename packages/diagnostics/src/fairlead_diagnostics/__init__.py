"""Is this machine, this allocation fit to train, and what is fast on it: `fairlead doctor`."""

from fairlead_diagnostics.checking import Asked, Bench, Check, Result
from fairlead_diagnostics.checks import HERE, LOCAL

__all__ = ["HERE", "LOCAL", "Asked", "Bench", "Check", "Result"]

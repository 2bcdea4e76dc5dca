"""Is this machine, this allocation fit to train, and what is fast on it: `fairlead doctor` and `fairlead bench`."""

from fairlead_diagnostics.checking import Bench, Check, Requested, Result

__all__ = ["Bench", "Check", "Requested", "Result"]

"""Is this machine, this allocation fit to train, and what is fast on it: `fairlead doctor` and `fairlead bench`."""

from fairlead_diagnostics.checking import Asked, Bench, Check, Result

__all__ = ["Asked", "Bench", "Check", "Result"]

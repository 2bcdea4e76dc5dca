"""The command `doctor`."""

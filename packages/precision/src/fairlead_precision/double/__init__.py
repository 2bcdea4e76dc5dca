"""64-bit numbers throughout."""

"""32-bit numbers throughout."""

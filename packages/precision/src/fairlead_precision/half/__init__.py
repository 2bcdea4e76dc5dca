"""16-bit numbers throughout."""

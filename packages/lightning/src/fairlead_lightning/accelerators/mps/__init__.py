"""The GPU of an Apple computer."""

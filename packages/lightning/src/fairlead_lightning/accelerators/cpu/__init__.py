"""The machine's processor."""

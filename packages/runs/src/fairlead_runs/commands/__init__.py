"""The commands about runs."""

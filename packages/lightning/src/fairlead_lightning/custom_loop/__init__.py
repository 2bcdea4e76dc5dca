"""A run directory for the user's own loop, with Fabric or without."""

"""Exact resume: the state that Lightning does not save, and the data from the very next sample on."""

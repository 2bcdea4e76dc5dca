"""A byte-level GPT on the source of Python's standard library. Plain Lightning: nothing here imports fairlead."""

"""Is this machine, this allocation fit to train, and what is fast on it: `fairlead doctor` and `fairlead bench`."""

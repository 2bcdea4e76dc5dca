"""The environment `lsf`."""

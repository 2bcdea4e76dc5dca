"""The environment `lightning`."""

"""The environment `manual`."""

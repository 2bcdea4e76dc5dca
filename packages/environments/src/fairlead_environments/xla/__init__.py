"""The environment `xla`."""

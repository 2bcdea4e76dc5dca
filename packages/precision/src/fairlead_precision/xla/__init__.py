"""The precision of the strategy `xla`."""

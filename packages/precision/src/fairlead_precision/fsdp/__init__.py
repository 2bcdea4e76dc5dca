"""The precision of the strategy `fsdp`."""

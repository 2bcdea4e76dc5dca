"""The precision of the strategy `deepspeed`."""

"""One device, one process."""

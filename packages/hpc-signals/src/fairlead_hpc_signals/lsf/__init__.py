"""The requeuer `lsf`: `brequeue`."""

"""Fully sharded data parallel, torch's first generation (FSDP1)."""

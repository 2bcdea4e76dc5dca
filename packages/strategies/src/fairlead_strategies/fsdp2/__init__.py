"""Fully sharded data parallel, torch's second generation (`fully_shard`)."""

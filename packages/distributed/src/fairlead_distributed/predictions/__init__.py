"""Predictions of many ranks: which batches there are, the shards that they are written to, and how they are read."""

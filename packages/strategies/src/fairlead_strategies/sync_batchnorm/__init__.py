"""Batch normalisation over the batches of all ranks."""

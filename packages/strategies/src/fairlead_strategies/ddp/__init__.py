"""Distributed data parallel: a full copy of the model on every rank."""

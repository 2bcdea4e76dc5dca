"""Checkpoints of a Trainer: when they are made, how they are committed, how they are loaded."""

"""Quantised linear layers by bitsandbytes."""

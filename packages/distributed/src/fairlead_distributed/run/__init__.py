"""A run as its ranks share it: joined, opened by one of them for all, resumed from one checkpoint."""

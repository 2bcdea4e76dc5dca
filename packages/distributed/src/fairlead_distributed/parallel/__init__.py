"""Ways to split a model over ranks, for any PyTorch loop."""

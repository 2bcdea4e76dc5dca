"""Ways to split a model over ranks, as torch modules for any loop. No Lightning."""

"""How a fit begins, is stopped, hangs, fails and ends."""

"""Local SGD for Fairlead: an example of a strategy from outside the project."""

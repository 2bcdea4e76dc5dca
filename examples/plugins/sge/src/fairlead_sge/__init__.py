"""Grid Engine for Fairlead: an example of a scheduler from outside the project."""

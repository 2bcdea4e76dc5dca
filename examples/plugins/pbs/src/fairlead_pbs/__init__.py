"""PBS for Fairlead: an example of an environment from outside the project."""

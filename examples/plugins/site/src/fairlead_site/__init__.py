"""What a computing site may add to Fairlead: examples of four kinds of plugins from outside the project."""

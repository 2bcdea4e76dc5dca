"""A trained model as a file that runs without its code: `fairlead export`."""

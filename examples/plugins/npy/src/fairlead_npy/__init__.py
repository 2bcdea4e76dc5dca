"""Checkpoints as folders of NumPy's files: an example of a checkpoint IO from outside the project."""

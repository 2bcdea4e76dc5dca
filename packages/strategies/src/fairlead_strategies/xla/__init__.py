"""TPUs through torch-xla."""

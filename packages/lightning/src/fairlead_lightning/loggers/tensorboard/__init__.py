"""TensorBoard."""

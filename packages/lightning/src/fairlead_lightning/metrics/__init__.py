"""What was logged and predicted, as files."""

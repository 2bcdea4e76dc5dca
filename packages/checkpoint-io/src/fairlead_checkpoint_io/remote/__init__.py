"""The backend `remote`: checkpoints are saved locally and copied to an object store in the background."""

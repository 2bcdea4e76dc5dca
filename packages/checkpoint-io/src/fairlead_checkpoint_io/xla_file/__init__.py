"""The backend `xla`: as `torch`, for tensors on TPUs."""

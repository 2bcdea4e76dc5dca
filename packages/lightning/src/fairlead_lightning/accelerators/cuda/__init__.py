"""GPUs of NVIDIA (CUDA) and AMD (ROCm, which torch drives under the name `cuda`)."""

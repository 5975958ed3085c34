"""What ``gpu_check`` runs on a device: cases of kernels, layers of the real shape, the model that serves."""

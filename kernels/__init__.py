"""Tensors in, tensors out: the arithmetic of the model, one folder per family. Knows torch and nothing else of ours."""

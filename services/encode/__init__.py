"""Encode workers: images in, embeddings under a lease out."""

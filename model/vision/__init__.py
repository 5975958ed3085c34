"""The vision encoder: images to embeddings. ``geometry`` and ``pixels`` need no torch."""

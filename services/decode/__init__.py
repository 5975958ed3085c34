"""Decode workers: KV in, tokens out."""

"""Prefill workers: prompts in, KV under a lease out."""

"""``completions``: raw prompts, several at once if wanted, and text in the middle (FIM)."""

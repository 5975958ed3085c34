"""``tokenize`` and ``detokenize``: what the other endpoints would make of a text, without running it."""

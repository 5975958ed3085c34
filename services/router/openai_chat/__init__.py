"""``chat/completions``: OpenAI's shape under ``/v1``, DeepSeek's own under the paths without it."""

"""``/v1/messages`` and ``count_tokens``: Anthropic's protocol, also under ``/anthropic``."""

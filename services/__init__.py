"""The processes: router, prefill, decode, and what they share."""

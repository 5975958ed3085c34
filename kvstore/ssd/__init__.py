"""Blocks on SSD: days of KV, never a wrong byte, never more disk than was given."""

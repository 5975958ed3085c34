"""Keeps and moves blocks of KV bytes. Knows sizes and hashes, never what is inside."""

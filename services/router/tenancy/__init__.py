"""Tenants: who asks, how much they may ask for, and what an administrator sees of it."""

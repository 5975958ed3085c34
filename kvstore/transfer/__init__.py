"""Moves registered bytes between processes: one protocol, one implementation per transport."""

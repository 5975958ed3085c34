"""Grammars for constrained output: written from formats and tools, checked, compiled. Needs no torch."""

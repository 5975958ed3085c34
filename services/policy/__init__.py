"""Decisions as pure functions: a snapshot goes in, a choice comes out, ties are broken by name.

Nothing here awaits, reads a clock or keeps state, so a simulator runs the same code on a virtual clock.
"""

"""Misfortune by plan: what happens when, to which process, under which load, and what must hold all the same."""

"""Decisions: a snapshot goes in, a choice comes out, ties are broken by name.

Nothing here awaits or reads a clock, so a simulator runs the same code on a virtual one. Choices are pure functions;
the three that remember (``length_model``, ``length_cells``, ``fairness``) are bounded and get time as an argument.
"""

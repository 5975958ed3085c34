"""A cluster on a virtual clock, driven by the policies of ``services.policy`` and by published ones.

Same seed, same bytes.
"""

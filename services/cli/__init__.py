"""The command line: composes the roles into one machine's server and talks to running ones.

Commands import what they need when they run, so that ``--version`` and ``chat`` start without torch.
"""

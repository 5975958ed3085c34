"""What ends a command: one line on stderr and exit status 1, no traceback."""


class CommandError(Exception):
    """A command cannot go on. The message is one line that says what is wrong and what to do."""

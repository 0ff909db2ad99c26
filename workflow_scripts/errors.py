"""The two errors that end a command with one readable message and no traceback."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong, where, and what to do."""


class GateFailed(UserError):
    """A gate ran to its end and its verdict is `fail`: the result is kept for reading, the release stops."""

"""The errors that a user sees: one sentence that says what to do, and an exit code."""


class IaprofError(Exception):
    """Anything that ends a command. Its text is the whole message; `cli.main` prints it without a traceback."""

    exit_code = 1


class UsageError(IaprofError):
    """The command was called in a way that cannot work."""

    exit_code = 2

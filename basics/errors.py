"""Exceptions whose text the user sees: one sentence that says what is wrong and what to do, and an exit code."""


class IaprofError(Exception):
    """Ends a command. Its text is the whole message; `cli.main` prints it without a traceback."""

    exit_code = 1


class UsageError(IaprofError):
    """The command line is wrong."""

    exit_code = 2

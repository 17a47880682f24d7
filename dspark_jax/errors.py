"""The one exception for mistakes that the user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Bad input by the user: a file, a name or a setting.

    The message is one line that names the thing and the mend. Command-line doors print it, without a
    traceback, and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        # Reasons quoted from other libraries hold line breaks; the promise of one line is kept here.
        super().__init__(" ".join(line.strip() for line in message.splitlines()))

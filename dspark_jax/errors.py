"""The one exception for mistakes that the user can mend."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """Bad input by the user: a file, a name or a setting.

    The message is one line that names the thing and the mend. Command-line doors print it, without a
    traceback, and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        # Reasons quoted from other libraries hold line breaks; the promise of one line is kept here.
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


def is_full(error: BaseException) -> bool:
    """Whether an error of a write says that the disk is full, or one's share of it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


@contextlib.contextmanager
def full_disk_named(path: str | Path, kept: str) -> Iterator[None]:
    """A disk that is full while `path` is written becomes a UserError; `kept` says what is safe and how to go on."""
    try:
        yield
    except Exception as error:  # those of Orbax and TensorStore are ValueErrors and more
        if not is_full(error):
            raise
        raise UserError(f"{path} cannot be written: the disk is full; {kept}") from None

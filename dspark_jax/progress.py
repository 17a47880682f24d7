"""A progress bar that keeps still in logs: live on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress

_PLAIN_EVERY = 30.0  # seconds between lines when the output is no terminal


class Progress:
    """Steps done out of a total, with the time left and a free text."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done, self._text = what, total, 0, ""
        self._console = rich.console.Console(stderr=True)
        self._plain = not self._console.is_terminal
        self._last = self._start = time.monotonic()
        self._first: int | None = None
        self._finished = False
        if not self._plain:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.fields[text]}"),
            )
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=total, text="")

    def update(self, done: int, text: str = "") -> None:
        """Sets the count of steps done."""
        self._done, self._text = done, text
        if self._first is None:
            self._first = done
        if not self._plain:
            self._bar.update(self._task, completed=done, text=text)
        elif time.monotonic() - self._last > _PLAIN_EVERY or (done >= self._total and not self._finished):
            self._last, self._finished = time.monotonic(), done >= self._total
            print(f"{self._what} {done}/{self._total} {self._left()} {text}", file=sys.stderr, flush=True)

    def advance(self, steps: int, text: str = "") -> None:
        self.update(self._done + steps, text)

    def _left(self) -> str:
        fresh = self._done - (self._first or 0)
        if not fresh:
            return ""
        seconds = (time.monotonic() - self._start) / fresh * (self._total - self._done)
        return f"({seconds / 60:.0f} min left)"

    def __enter__(self) -> Self:
        if not self._plain:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._plain:
            self._bar.stop()

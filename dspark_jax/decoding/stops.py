"""Stop strings: text is shown only when no stop string can take it back, and tokens end where the text does."""

import collections
from collections.abc import Sequence

from dspark_jax.interop.tokenizer import StreamDecoder, Tokenizer


class StopText:
    """Turns tokens into text, one at a time, and looks for stop strings, which may straddle tokens and rounds.

    The earliest stop string ends the text at its first character, and the tokens with the last one that holds some of
    the text before it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._decoder, self._stops = tokenizer, StreamDecoder(tokenizer), stops
        self._ids: list[int] = []
        self._held = ""  # text behind what is shown: it may be the beginning of a stop string
        self._first = self._least = 0  # a stop string counts if it begins at this character or later, behind this token
        self._ends: collections.deque[int | None] = collections.deque()  # of tokens not settled; None: in a character
        self.text = ""  # shown, and never taken back
        self.settled = 0  # tokens whose text is all shown
        self.stopped = False

    def push(self, token: int, searching: bool = True) -> str:
        """Takes a token and returns the text that it shows. `searching` False: its text may hold stop strings."""
        self._ids.append(token)
        self._ends.append(None)
        return self._show(self._decoder.push([token]), searching)

    def flush(self, searching: bool = True) -> str:
        """Ends the text: returns what was held back."""
        return self._show(self._decoder.flush(), searching, last=True)

    def kept(self) -> int:
        """How many tokens the stopped answer keeps: as few as hold its text, settled and unsearched ones among them."""
        count = max(self.settled, self._least)
        while not self._tokenizer.decode(self._ids[:count]).startswith(self.text):
            count += 1
        return count

    def _show(self, delta: str, searching: bool, last: bool = False) -> str:
        self._held += delta
        total, pending = len(self.text) + len(self._held), self._decoder.pending
        if not searching:  # nor may an unfinished character begin a stop string
            self._first, self._least = total + pending, len(self._ids)
        begin = max(self._first - len(self.text), 0)
        found = [i for i in (self._held.find(stop, begin) for stop in self._stops) if i >= 0]
        self.stopped = bool(found)
        keep = min(found) if found else len(self._held) - (0 if last else self._unsure(self._held[begin:]))
        visible, self._held = self._held[:keep], self._held[keep:]
        self.text += visible
        if not pending:
            self._ends = collections.deque(total if end is None else end for end in self._ends)
        while self._ends and self._ends[0] is not None and self._ends[0] <= len(self.text):
            self._ends.popleft()
            self.settled += 1
        return visible

    def _unsure(self, text: str) -> int:
        """Length of the longest end of a text that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)

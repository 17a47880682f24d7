"""Stop strings: text is shown only when no stop string can take it back, and tokens end where the text does."""

from collections.abc import Sequence

from dspark_jax.interop.tokenizer import StreamDecoder


class StopText:
    """Turns tokens into text, one at a time, and looks for stop strings, which may straddle tokens and rounds.

    A token is *settled* when all of its text has been shown. A stop string ends text and tokens at its first
    character; a token that also holds text before it is kept.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]):
        self._decoder, self._stops = decoder, stops
        self._held = ""  # text that may be the beginning of a stop string
        self._shown = 0  # characters shown
        self._ends: list[int | None] = []  # where each token's text ends; None: inside an unfinished character
        self.stopped = False

    def push(self, token: int, searching: bool = True) -> str:
        """Takes a token and returns the text that it shows. `searching` False: no stop string counts yet."""
        return self._show(self._decoder.push([token]), True, self._decoder.pending, searching)

    def flush(self, searching: bool = True) -> str:
        """Ends the text: returns what was held back."""
        return self._show(self._decoder.flush(), False, False, searching, last=True)

    @property
    def settled(self) -> int:
        """How many tokens may be shown, or, once stopped, how many the answer keeps."""
        known = [end for end in self._ends if end is not None]
        whole = sum(end <= self._shown for end in known)
        straddles = self.stopped and whole < len(known) and (known[whole - 1] if whole else 0) < self._shown
        return whole + straddles

    def _show(self, delta: str, is_token: bool, pending: bool, searching: bool, last: bool = False) -> str:
        self._held += delta
        total = self._shown + len(self._held)
        if is_token:
            self._ends.append(None)
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0] if searching else []
        if found or not pending:
            self._ends = [total if end is None else end for end in self._ends]
        if found:
            self.stopped, keep = True, min(found)
        else:
            keep = len(self._held) - (0 if last or not searching else self._unsure())
        visible, self._held = self._held[:keep], "" if found else self._held[keep:]
        self._shown += len(visible)
        return visible

    def _unsure(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)

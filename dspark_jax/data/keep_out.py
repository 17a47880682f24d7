"""Keeps evaluation questions out of training prompts, by shared runs of words."""

import collections
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from dspark_jax.data.conversations import Messages
from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.errors import UserError

# Thirteen words in a row are hardly ever the same by chance (GPT-3's choice, arXiv 2005.14165, appendix C); a shorter
# question counts as one run, down to the length at which everyday sentences agree.
RUN, SHORTEST = 13, 8
# A line that stands in more questions than this is an instruction ("put your answer in a box"), not the question.
COMMON = 5


class KeepOut:
    """Texts that must not be trained on. Words are compared without case and punctuation."""

    def __init__(self, texts: Iterable[str]):
        texts = list(texts)
        lines = collections.Counter(line for text in texts for line in set(_lines(text)))
        self._runs: dict[int, set[str]] = collections.defaultdict(set)
        self._whole: set[str] = set()
        for text in texts:
            own = [word for line in _lines(text) if lines[line] <= COMMON for word in line.split()]
            self._whole |= {" ".join(_words(text)), " ".join(own)} - {""}
            if len(own) >= SHORTEST:
                size = min(RUN, len(own))
                self._runs[size].update(_runs(own, size))

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """The `turns` of all JSONL files in a folder. UserError when there are none."""
        files = sorted(Path(folder).glob("*.jsonl"))
        texts = [turn for file in files for _, row in read_jsonl(file) for turn in _turns(row)]
        if not texts:
            raise UserError(f"data.keep_out={folder}: it should be a folder of JSONL files with rows of `turns`")
        return cls(texts)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the texts."""
        return hashlib.sha256("\n".join(sorted(self._whole)).encode()).hexdigest()[:16]

    def shared(self, messages: Messages) -> str | None:
        """A run of words that a user turn shares with the texts, or None."""
        for message in messages:
            words = _words(message["content"]) if message["role"] == "user" else []
            if " ".join(words) in self._whole:
                return " ".join(words)
            for size, known in self._runs.items():
                found = next((run for run in _runs(words, size) if run in known), None)
                if found:
                    return found
        return None


def _turns(row: dict) -> list[str]:
    turns = row.get("turns")
    return [turn for turn in turns if isinstance(turn, str)] if isinstance(turns, list) else []


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _lines(text: str) -> list[str]:
    """The words of each line, those of no words left out."""
    return [line for line in (" ".join(_words(line)) for line in text.splitlines()) if line]


def _runs(words: list[str], size: int) -> Iterator[str]:
    return (" ".join(words[i : i + size]) for i in range(len(words) - size + 1))

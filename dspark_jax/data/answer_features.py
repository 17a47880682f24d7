"""Features of answers, written into a cache while the engine gives them: no other pass of the target is needed."""

from collections.abc import Sequence

from dspark_jax.data.cache_writer import CacheWriter, sink_writer
from dspark_jax.data.masks import join_turns
from dspark_jax.data.turns import Line, conversations
from dspark_jax.interop.target_io import Target


class AnswerFeatures:
    """Adds training rows to a cache as soon as the turns that make them have ended. `sink` is for the engine.

    `lines`: the answers that are there already. What this cannot write is left to `prepare_features.fill`: the features
    of turns that were to be learnt in the next one's context, which then failed, and of answers whose part of the cache
    was not finished.
    """

    def __init__(self, writer: CacheWriter, target: Target, lines: Sequence[Line]):
        self.sink, self._finish = sink_writer(writer, target)
        self._turns = {_conversation(turns[0]): turns for turns in conversations(lines)}
        self._answered = sum(line["finish_reason"] != "error" for line in lines)

    def take(self, request: int, line: Line, next_ids: list[int] | None) -> None:
        """What `request` of the engine has answered, when its line is kept.

        `next_ids`: the prompt of the conversation's next turn; None where there is none.
        """
        key = _conversation(line)
        if line["finish_reason"] == "error":
            self._finish(request, 0, None)
            return
        turns = self._turns.setdefault(key, [])
        turns.append(line)
        ids = line["prompt_ids"] + line["answer_ids"]
        joined = next_ids is not None and next_ids[: len(ids)] == ids  # as `join_turns` will have it
        # A row's place is that of its last line.
        self._finish(request, self._answered, None if joined else join_turns([turns])[-1])
        self._answered += 1
        if next_ids is None:
            del self._turns[key]


def _conversation(line: Line) -> str:
    return line.get("conversation", line["id"])

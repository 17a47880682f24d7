"""The sink gets what a plain pass over prompt and answer computes, whatever drafts, stops and batches came between."""

import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.sink import Sink
from dspark_jax.errors import UserError


class Collected:
    """Rows of every request, as they came, and the tokens shown by the time they came."""

    def __init__(self):
        self.rows: dict[int, list] = {}

    def __call__(self, request, rows):
        self.rows.setdefault(request.index, []).append(rows)

    def of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        parts = self.rows[index]
        return tuple(np.concatenate([getattr(p, name) for p in parts]) for name in ("taps_NxMH", "hidden_NxH"))


def plain_rows(target, tap_layers, prompt, answer):
    """The rows of a whole text, but that of the last token."""
    out = target.with_taps(tap_layers)(np.asarray([[*prompt, *answer][:-1]]))
    return np.asarray(out.taps[0]), np.asarray(out.last_hidden[0])


@pytest.mark.parametrize("layers", [(0,), (2, 0)], ids=["another layer", "one of the drafter's and another"])
def test_rows_are_those_of_a_plain_pass(x64, few_programs, tiny_target, tiny_drafter, layers):
    """Prompts with a common beginning, longer than a chunk's end and of one token; drafts accepted and rejected."""
    target = tiny_target()
    got = Collected()
    engine = Engine(target, tiny_drafter(target), max_slots=3, page_size=4, sink=Sink(layers, got))
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 30, 2], [5], [7, 7, 7]]
    outs = engine.generate(prompts, [SamplingParams(temperature=t, seed=3, max_tokens=n) for t, n in
                                     ((0, 14), (1.0, 9), (0, 1), (0.7, 11))])  # fmt: skip
    assert sum(sum(out.accepted) for out in outs) > 3
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        want = plain_rows(target, layers, prompt, out.token_ids)
        if len(prompt) + len(out.token_ids) == 2:
            assert [len(a) for a in got.of(i)] == [1, 1]
        for ours, theirs in zip(got.of(i), want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_no_row_is_taken_back(x64, talk):
    """Stop strings, begun and not completed or completed: rows follow the tokens that events show."""
    got, shown = Collected(), {}
    engine = Engine(talk.target, strategy="off", max_slots=2, rounds_per_dispatch=3, sink=Sink((1,), got))
    prompts = [[int(i), 3, 9] for i in range(6)]
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=20, stop=("abc", "é", "ca", "b a"))
    requests = engine.requests(prompts, params)
    for request, event in engine.run(requests, 3):
        shown[request.index] = shown.get(request.index, 0) + len(event.token_ids)
        rows = sum(len(part.hidden_NxH) for part in got.rows[request.index])
        assert rows == len(prompts[request.index]) + shown[request.index] - 1
    assert {request.completion.finish_reason for request in requests} >= {"stop"}
    for request in requests:
        want = plain_rows(talk.target, (1,), request.prompt_ids, request.completion.token_ids)
        np.testing.assert_allclose(got.of(request.index)[1], want[1], atol=1e-10)


def test_a_layer_that_is_not_there(x64, tiny_target):
    with pytest.raises(UserError, match="tap"):
        Engine(tiny_target(), sink=Sink((99,), print))

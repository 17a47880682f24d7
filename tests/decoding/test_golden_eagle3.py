"""Greedy decoding with the golden Eagle3 drafter, round by round, against the reference (spec 5.4 and 7)."""

import itertools
import json

import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target

DRAFTS = 5


@pytest.fixture(scope="module")
def pair(golden):
    target = load_target(golden / "target", dtype="float32")
    return target, load_drafter(golden / "eagle3", target)


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "eagle3_greedy.json").read_text())


@pytest.fixture(scope="module")
def outs(pair, cases):
    """All golden prompts. The reference's prefill gives the first token: our prompts end there."""
    engine = Engine(*pair, max_slots=len(cases), max_length=128, rounds_per_dispatch=64)  # one wave, one program
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=c["max_new_tokens"] - 1, stop_token_ids=(c["stop"],), ignore_eos=True
        )
        for c in cases
    ]
    return engine.generate([c["prompt"] + c["output"][:1] for c in cases], params)


def test_tokens(cases, outs):
    for case, out in zip(cases, outs, strict=True):
        assert case["output"][:1] + out.token_ids == case["output"]
        assert out.finish_reason == ("stop" if case["output"][-1] == case["stop"] else "length")


def test_accepted_drafts_of_every_round(cases, outs):
    for case, out in zip(cases, outs, strict=True):
        lengths = case["acceptance_lengths"]
        # The reference may start a round when the budget is spent, and never trims a count.
        assert len(lengths) - len(out.accepted) in (0, 1)
        last = len(out.accepted) - 1
        assert out.accepted[:-1] == [n - 1 for n in lengths[:last]]
        left = len(out.token_ids) - sum(lengths[:last])
        # A round that ends on an accepted stop token has no bonus in the reference's count.
        stopped = {lengths[last] - 1, lengths[last]}
        assert out.accepted[-1] in (stopped if out.finish_reason == "stop" else {min(lengths[last] - 1, left)})
        assert set(out.verified) == {DRAFTS}


def test_drafts_of_every_round(pair, cases, drafts_after):
    seen = 0
    for case in cases:
        tokens, first = case["prompt"] + case["output"], len(case["prompt"]) + 1
        starts = [first + n for n in itertools.accumulate(case["acceptance_lengths"][:-1], initial=0)]
        known = [n for n in starts if n <= len(tokens)]  # the last round may start behind the trimmed output
        proposal = drafts_after(*pair, tokens, known, SamplingParams(temperature=0.0), "rejection")
        for ours, trace in zip(proposal.token_RxK.tolist(), case["trace"], strict=False):
            drafted = trace["drafted"]
            assert ours[: len(drafted)] == drafted
            assert len(drafted) == DRAFTS or drafted[-1] == case["stop"]  # the reference stops proposing there
            seen += len(drafted)
    assert seen > 100

"""Greedy decoding of the golden pairs, round by round, against the reference implementation (deepspec.md section 7)."""

import itertools
import json

import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target

GREEDY = SamplingParams(temperature=0.0)
TARGETS = {"dspark_vanilla": "target", "gemma4_keqv": "gemma4_keqv_target"}
THRESHOLD = "dspark_vanilla_greedy_threshold0.5.json"


@pytest.fixture(scope="module", params=TARGETS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pair(golden, name):
    target = load_target(golden / TARGETS[name], dtype="float32")
    return target, load_drafter(golden / name, target)


def read_cases(path):
    """The file's requests. Gemma4's has neither stop tokens nor limits: its outputs end at the limit."""
    return [{"stop": None, "max_new_tokens": len(c["output"]), **c} for c in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def cases(golden, name):
    return read_cases(golden / f"{name}_greedy.json")


@pytest.fixture(scope="module")
def outs(pair, cases):
    """All golden prompts, in fewer slots. The reference's prefill gives the first token: our prompts end there."""
    target, drafter = pair
    engine = Engine(target, drafter, max_slots=3, max_length=128, rounds_per_dispatch=64)  # two waves, one program
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=c["max_new_tokens"] - 1,
            stop_token_ids=() if c["stop"] is None else (c["stop"],),
            ignore_eos=True,
        )
        for c in cases
    ]
    return engine.generate([c["prompt"] + c["output"][:1] for c in cases], params)


def test_tokens(cases, outs):
    for case, out in zip(cases, outs, strict=True):
        assert case["output"][:1] + out.token_ids == case["output"]
        stopped = case["output"][-1] == case["stop"]
        assert out.finish_reason == ("stop" if stopped else "length")


def test_accepted_drafts_of_every_round(cases, outs):
    for case, out in zip(cases, outs, strict=True):
        lengths = case["acceptance_lengths"]
        # The reference may start a round when the budget is spent, and never trims a count: we emit at most the budget.
        assert len(lengths) - len(out.accepted) in (0, 1)
        assert out.accepted[:-1] == [n - 1 for n in lengths[: len(out.accepted) - 1]]
        left = len(out.token_ids) - sum(lengths[: len(out.accepted) - 1])
        drafts = lengths[len(out.accepted) - 1] - 1
        # A round that ends on an accepted stop token has no bonus in the reference's count.
        possible = {drafts, drafts + 1} if out.finish_reason == "stop" else {min(drafts, left)}
        assert out.accepted[-1] in possible
        assert set(out.verified) == {5}


def round_starts(case) -> list[int]:
    """Committed tokens, anchor included, before each round of the trace."""
    first = len(case["prompt"]) + 1
    return [first + n for n in itertools.accumulate(case["acceptance_lengths"][:-1], initial=0)]


def test_drafts_and_confidence_of_every_round(pair, cases, drafts_after):
    check_drafts(pair, cases, drafts_after)


def test_the_threshold_cuts_where_the_reference_cuts(golden, drafts_after):
    target = load_target(golden / "target", dtype="float32")
    pair = (target, load_drafter(golden / "dspark_vanilla", target))
    check_drafts(pair, read_cases(golden / THRESHOLD), drafts_after, threshold=True)


def check_drafts(pair, cases, drafts_after, threshold: bool = False):
    seen = 0
    for case in cases:
        tokens, starts = case["prompt"] + case["output"], round_starts(case)
        known = [n for n in starts if n <= len(tokens)]  # the last round may start behind the trimmed output
        proposal = drafts_after(*pair, tokens, known, GREEDY, "rejection")
        for i, trace in enumerate(case["trace"][: len(known)]):
            drafted, confidence = trace["drafted"], trace["confidence_logits"]
            count = case["proposal_lengths"][i] if drafted is None else len(drafted)
            if drafted is not None:
                assert proposal.token_RxK[i, :count].tolist() == drafted
            if confidence is not None:
                # The file has five decimals.
                np.testing.assert_allclose(
                    proposal.confidence_RxK[i, : len(confidence)], confidence, rtol=1e-4, atol=2e-5
                )
            if threshold:
                # The reference cuts a proposal before the first confidence below the threshold: logit 0 is one half.
                below = np.append(proposal.confidence_RxK[i] < 0, True)
                assert count == np.argmax(below)
            seen += count
    assert seen > 100


def test_threshold_changes_rounds_but_not_tokens(golden):
    """Both golden files say the same: what the engine must equal does not depend on how many drafts are verified."""
    whole, cut = (read_cases(golden / name) for name in ("dspark_vanilla_greedy.json", THRESHOLD))
    assert [c["output"] for c in whole] == [c["output"] for c in cut]
    assert sum(len(c["acceptance_lengths"]) for c in cut) >= sum(len(c["acceptance_lengths"]) for c in whole)

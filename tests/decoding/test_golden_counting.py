"""The reference's own way of counting rounds, reproduced exactly on its golden runs (deepspec.md section 7)."""

import json

import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Completion
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.evaluation.metrics import deepspec_lengths, deepspec_stats
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target

ROOM = 6  # a block and the bonus


RUNS = {
    "dspark_vanilla_greedy": "auto",
    "dspark_vanilla_greedy_threshold0.5": "threshold:0.5",
    "dspark_rnn_greedy": "auto",
    "dflash_greedy": "auto",
    "eagle3_greedy": "auto",
}


@pytest.mark.parametrize("name", RUNS)
def test_acceptance_lengths_of_every_round(golden, name):
    target = load_target(golden / "target", dtype="float32")
    cases = json.loads((golden / f"{name}.json").read_text())
    drafter = load_drafter(golden / name.partition("_greedy")[0], target)
    engine = Engine(target, drafter, strategy=RUNS[name], max_slots=6, max_length=256, rounds_per_dispatch=64)
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=c["max_new_tokens"] + ROOM, stop_token_ids=(c["stop"],), ignore_eos=True
        )
        for c in cases
    ]
    outs = engine.generate([c["prompt"] + c["output"][:1] for c in cases], params)
    for case, out in zip(cases, outs, strict=True):
        assert deepspec_lengths(out, case["max_new_tokens"]) == case["acceptance_lengths"]
    lengths = [n for c in cases for n in c["acceptance_lengths"]]
    proposals = [n for c in cases for n in c["proposal_lengths"]]
    stats = deepspec_stats(outs, cases[0]["max_new_tokens"])
    assert stats["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert stats["draft_tokens_per_proposal"] == pytest.approx(sum(proposals) / len(proposals))
    assert stats["verify_rate"] == pytest.approx(sum(lengths) / (sum(proposals) + len(proposals)))
    # A round whose threshold proposed nothing is no evidence about the first slot.
    assert stats["accept_rate"][0] == pytest.approx(sum(n > 1 for n in lengths) / sum(p > 0 for p in proposals))


def test_a_round_that_ends_on_an_accepted_stop_token_has_no_bonus():
    # Rounds of 3 and 2 tokens; the second ended on its second draft, a stop token, of 5 verified.
    out = Completion([1, 2, 3, 4, 257], "", "stop", [5, 5], [5, 5], [2, 2])
    assert deepspec_lengths(out, 40) == [3, 2]
    stats = deepspec_stats([out], 40)
    assert stats["draft_tokens_per_proposal"] == (5 + 2) / 2  # the proposal counts up to the stop token
    assert stats["verify_rate"] == 5 / (5 + 2 + 2)
    assert stats["accept_rate"][:2] == [1.0, 1.0]

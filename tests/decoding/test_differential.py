"""Hundreds of random requests: every engine says what plain decoding says of each alone, in float64, to the letter."""

import jax
import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Completion
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time
from dspark_jax.scheduling.scheduler import row_buckets

CONTEXT, VOCAB, TOKENS = 64, 46, 39
LENGTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 62, 63)  # of prompts, one token to the end of the context
STOPS = ("a", "b", "ab", "bc", "é", "€", " ", "cde", "Cé", "\ufffd", "aa", "fga", "never", "abcabcabc")


def random_request(seed: int) -> tuple[list[int], SamplingParams]:
    """A prompt and parameters; each parameter is at its default in about half of the requests."""
    rng = np.random.default_rng(seed)

    def maybe(value, default, chance: float = 0.5):
        return value if rng.random() < chance else default

    def real(low: float, high: float) -> float:
        return round(float(rng.uniform(low, high)), 3)

    length = int(rng.choice(LENGTHS)) if rng.random() < 0.5 else int(rng.integers(1, 50))
    # Texts that repeat themselves, so that penalties have something to count; some share their beginning.
    prompt = np.resize(np.random.default_rng(maybe(seed % 3, seed)).integers(0, TOKENS, 11), length).tolist()
    prompt[-1] = int(rng.integers(TOKENS))
    max_tokens = int(rng.integers(1, 64)) if rng.random() < 0.2 else int(rng.integers(1, 24))
    params = SamplingParams(
        temperature=maybe(real(0.2, 2.0), 0.0, 0.7),
        top_k=maybe(int(rng.integers(1, 12)), 0, 0.4),
        top_p=maybe(real(0.2, 1.0), 1.0, 0.4),
        min_p=maybe(real(0.0, 0.3), 0.0, 0.3),
        repetition_penalty=maybe(real(0.7, 1.8), 1.0),
        presence_penalty=maybe(real(-1.0, 2.0), 0.0),
        frequency_penalty=maybe(real(-0.5, 1.0), 0.0),
        logit_bias={int(token): real(-5, 5) for token in rng.integers(0, VOCAB, int(maybe(rng.integers(1, 5), 0)))},
        seed=int(rng.integers(-(2**62), 2**62)),
        max_tokens=max_tokens,
        min_tokens=int(maybe(rng.integers(0, max_tokens + 1), 0)),
        stop=tuple(rng.choice(STOPS, int(maybe(rng.integers(1, 4), 0)), replace=False).tolist()),
        stop_token_ids=tuple(rng.integers(0, VOCAB, int(maybe(rng.integers(1, 3), 0, 0.3))).tolist()),
        ignore_eos=maybe(True, False),
        logprobs=int(rng.integers(1, 21)),
    )
    return prompt, params


@pytest.fixture(autouse=True)
def tiny(x64, few_programs):
    """All engines run one program each."""


@pytest.fixture(scope="module")
def engines(talk, tiny_drafter, tiny_eagle) -> dict[str, Engine]:
    """Drafters, block sizes, batch sizes and lengths of dispatches, mixed."""
    with jax.enable_x64(True):
        some = range(0, VOCAB, 3)  # a reduced vocabulary, with tokens, an end token's neighbours and padding
        random = tiny_drafter(talk.target, "random", 4, some)
        good = tiny_drafter(talk.target, "bigram", 3, [*range(20), *range(30, 42)])
        coupled = {"sampler": "coupled", "page_size": 4}
        return {
            "off, in company": talk.plain,
            "bigram, whole blocks": talk.whole,
            "random and reduced, one draft": Engine(
                talk.target, random, strategy="fixed:1", max_slots=5, rounds_per_dispatch=1, **coupled
            ),
            "reduced, rejection": Engine(talk.target, good, max_slots=2, rounds_per_dispatch=5),
            "eagle": Engine(talk.target, tiny_eagle(talk.target), max_slots=3, rounds_per_dispatch=3, **coupled),
        }


# "dcut" reads draft probabilities, which a lookup has none of.
SCHEDULED = [
    (strategy, drafter)
    for strategy in ("threshold:0.4", "load_aware", "load_aware_async", "dcut")
    for drafter in ("bigram", "reduced", "eagle", "lookup")
    if (strategy, drafter) != ("dcut", "lookup")
]


def costs(slots: int, drafts: int) -> CostTable:
    """Rounds whose rows are neither free nor dear: budgets of all sizes pay at some time."""
    target = {(rows, slots, CONTEXT): Time(1 + 0.2 * rows) for rows in row_buckets(slots, drafts)}
    stamp = Stamp("cpu", 1, "", "tiny", "", "", "float64", "")
    return CostTable(stamp, target, {(slots, CONTEXT): Time(0.1)})


@pytest.fixture(scope="module")
def scheduled(talk, tiny_drafter, tiny_eagle):
    """scheduled(strategy, drafter, sampler): an engine that decides round by round what to verify."""
    with jax.enable_x64(True):
        drafters = {
            "bigram": tiny_drafter(talk.target, "bigram", 4),
            "reduced": tiny_drafter(talk.target, "bigram", 3, [*range(20), *range(30, 42)]),
            "eagle": tiny_eagle(talk.target),
            "lookup": load_drafter("lookup", talk.target),
        }

    def make(strategy: str, drafter: str, sampler: str = "coupled", slots: int = 3) -> Engine:
        sizes = {"max_slots": slots, "rounds_per_dispatch": 4, "page_size": 4}
        table = None if strategy.startswith("threshold") else costs(slots, drafters[drafter].config.num_drafts)
        return Engine(talk.target, drafters[drafter], strategy=strategy, sampler=sampler, cost_table=table, **sizes)

    return make


@pytest.fixture(scope="module")
def alone(talk):
    """alone(requests): plain decoding of each in a batch of its own."""
    with jax.enable_x64(True):
        engine = Engine(talk.target, strategy="off", max_slots=1, rounds_per_dispatch=16)
    return lambda requests: engine.generate(*map(list, zip(*requests, strict=True)))


def compare(out: Completion, plain: Completion) -> None:
    """All that a user sees of an answer, and that its rounds add up to its tokens."""
    assert (out.token_ids, out.text, out.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert not out.error and len(out.logprobs) == len(out.token_ids)
    for ours, theirs in zip(out.logprobs, plain.logprobs, strict=True):
        assert ours.token_id == theirs.token_id and [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        values = [(e.logprob, *(value for _, value in e.top)) for e in (ours, theirs)]
        np.testing.assert_allclose(*values, atol=1e-9)
    assert len(out.drafted) == len(out.verified) == len(out.accepted) <= len(out.token_ids)
    assert sum(out.accepted) + len(out.accepted) - len(out.token_ids) in (0, 1) or not out.token_ids


def differences(engines: dict[str, Engine], alone, seeds: range) -> dict[str, float]:
    """Compares all engines with plain decoding; returns the share of drafts that each had accepted."""
    requests = [random_request(seed) for seed in seeds]
    plain, shares = alone(requests), {}
    check_variety(requests, plain)
    for n, (name, engine) in enumerate(engines.items()):
        order = np.random.default_rng(n).permutation(len(requests))
        # Rejection samples other tokens of the same law: there greedy requests alone must be equal.
        order = [i for i in order if engine.policy.sampler == "coupled" or requests[i][1].temperature == 0]
        outs = engine.generate([requests[i][0] for i in order], [requests[i][1] for i in order])
        for i, out in zip(order, outs, strict=True):
            try:
                compare(out, plain[i])
            except AssertionError as error:
                raise AssertionError(f"{name}, request {seeds[i]}: {requests[i]}") from error
        assert not engine.pages._users and engine.pages.available == engine.pages.total
        shares[name] = sum(sum(o.accepted) for o in outs) / max(1, sum(sum(o.verified) for o in outs))
    return shares


def check_variety(requests, outs) -> None:
    """The requests end in every way, after one token and at the end of the context."""
    reasons = [out.finish_reason for out in outs]
    assert min(reasons.count("stop"), reasons.count("length")) > len(outs) / 8
    by_text = [
        out for (_, p), out in zip(requests, outs, strict=True)
        if out.finish_reason == "stop" and (not out.token_ids or out.token_ids[-1] not in (7, *p.stop_token_ids))
    ]  # fmt: skip
    assert len(by_text) > len(outs) / 10
    full = sum(len(p) + len(out.token_ids) == CONTEXT for (p, _), out in zip(requests, outs, strict=True))
    assert full > len(outs) / 20 and any(len(out.token_ids) == 1 for out in outs)


def test_random_requests(engines, alone):
    shares = differences(engines, alone, range(200))
    print({name: round(share, 2) for name, share in shares.items()})
    assert shares["bigram, whole blocks"] > 0.2 and shares["reduced, rejection"] > 0.1


def test_random_requests_under_a_schedule(scheduled, alone):
    shares = differences({"load_aware": scheduled("load_aware", "bigram")}, alone, range(200, 300))
    assert shares["load_aware"] > 0.2


@pytest.mark.slow
def test_many_random_requests(engines, alone):
    differences(engines, alone, range(1000, 2000))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
@pytest.mark.parametrize("strategy, drafter", SCHEDULED)
def test_many_random_requests_under_every_schedule(scheduled, alone, strategy, drafter, sampler):
    differences({strategy: scheduled(strategy, drafter, sampler, slots=4)}, alone, range(2000, 2300))

"""Waiting, filling, sharing and leaving: the queue, chunks of long prompts, shared prefixes, cancellation."""

import collections
import dataclasses
import tracemalloc

import jax
import numpy as np
import pytest

from dspark_jax.decoding import admission
from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.caches import PageAllocator
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Request, new_requests
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.tokenizer import Tokenizer

PAGE, CHUNK, WORDS = 4, 8, 30  # WORDS: token ids of prompts


@pytest.fixture(autouse=True)
def tiny(request, monkeypatch):
    """Tests of the engine share a few programs, and prompts are cached in short chunks."""
    if "talk" in request.fixturenames:
        for name in ("x64", "few_programs", "pages_come_back"):
            request.getfixturevalue(name)
        monkeypatch.setattr(engine_module, "PREFILL_CHUNK", CHUNK)
        engines = request.getfixturevalue("talk").engines.values()
        for engine in engines:  # no test finds what another has cached
            engine.pages = PageAllocator(engine.pages.total)


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, WORDS, count).tolist()


def free(i: int, **changes) -> SamplingParams:
    base = {"temperature": (0.0, 0.9, 1.3)[i % 3], "seed": i, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**(base | changes))


@dataclasses.dataclass
class Run:
    """Requests of an engine and their events, in the order in which they came."""

    requests: list[Request]
    events: list[tuple[int, list[int], str | None]]

    @property
    def tokens(self) -> list[list[int]]:
        return [request.completion.token_ids for request in self.requests]


def run(engine, prompts, params, watch=lambda requests, events: None) -> Run:
    """Runs to the end; `watch` looks on after every event and may cancel."""
    requests, events = engine.requests(prompts, params), []
    for request, event in engine.run(requests, 3):
        events.append((request.index, event.token_ids, event.finish_reason))
        watch(requests, events)
    return Run(requests, events)


@pytest.fixture
def unshared(talk):
    """unshared(prompts, params): tokens of plain decoding that shares nothing."""

    def tokens(prompts, params):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageAllocator, "match", lambda self, keys: [])
            return run(talk.plain, prompts, params).tokens

    return tokens


# -------------------------------------------------------------------------------------------------------- cancellation

PROMPTS = [words(i, 3 + i) for i in range(6)]
PARAMS = [free(i, max_tokens=50 if i < 3 else 12) for i in range(6)]


@pytest.mark.parametrize("name", ["plain", "whole"])
def test_cancelling_a_running_request(talk, unshared, name):
    """Its slot and pages go to the next one in the queue while the neighbours go on, and harm nobody."""
    engine, held = getattr(talk, name), []

    def cancel_second(requests, events):
        if sum(index == 1 for index, *_ in events) == 1 and not requests[1].cancelled:
            requests[1].cancelled = True
            held.append(list(requests[1].pages))
        if requests[1].ended and len(held) == 1:
            held.append(list(requests[1].pages))

    done = run(engine, PROMPTS, PARAMS, cancel_second)
    expected = unshared(PROMPTS, PARAMS)
    assert held[0] and held[1] == []
    mine = [(tokens, reason) for index, tokens, reason in done.events if index == 1]
    assert [reason for _, reason in mine] == [None, "cancelled"] and mine[1][0] == []
    cancelled = done.requests[1].completion
    assert cancelled.token_ids == mine[0][0] == expected[1][: len(mine[0][0])]
    assert cancelled.finish_reason == "cancelled" and len(cancelled.logprobs) == len(cancelled.token_ids)
    assert [done.tokens[i] for i in (0, 2, 3, 4, 5)] == [expected[i] for i in (0, 2, 3, 4, 5)]
    # The fourth request had to wait for a slot, and got this one: nobody else had ended.
    first = next(n for n, (index, *_) in enumerate(done.events) if index == 3)
    assert all(reason is None for index, _, reason in done.events[:first] if index in (0, 2))


def test_cancelling_a_queued_request(talk, unshared, monkeypatch):
    seen = []
    real = admission.prompt_token_ids
    monkeypatch.setattr(
        admission, "prompt_token_ids", lambda prompt, *rest: (seen.append(prompt), real(prompt, *rest))[1]
    )

    def cancel_last(requests, events):
        requests[5].cancelled = True

    done = run(talk.whole, PROMPTS, PARAMS, cancel_last)
    assert [(t, r) for i, t, r in done.events if i == 5] == [([], "cancelled")]
    assert seen == PROMPTS[:5]  # it was not even looked at
    assert done.tokens[:5] == unshared(PROMPTS[:5], PARAMS[:5])


def test_cancelling_while_the_prompt_is_cached(talk, unshared):
    """Halfway through a long prompt, of which somebody else waits for the same pages."""
    long = words(9, 50)
    prompts = [PROMPTS[0], long, [*long[:40], *words(10, 5)], PROMPTS[3]]
    params = [free(i, max_tokens=12) for i in range(4)]
    halfway = []

    def cancel_long(requests, events):
        if requests[1].pages and not requests[1].cancelled:
            halfway.append(requests[1].cached)
            requests[1].cancelled = True

    done = run(talk.whole, prompts, params, cancel_long)
    assert 0 < halfway[0] < 49 and done.requests[1].completion.token_ids == []
    expected = unshared(prompts, params)
    assert [done.tokens[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_cancelling_everything(talk):
    done = run(talk.whole, PROMPTS, PARAMS, lambda requests, _: [setattr(r, "cancelled", True) for r in requests])
    assert sorted(index for index, _, reason in done.events if reason == "cancelled") == list(range(6))
    assert len(done.events) <= 2 * 6


# ------------------------------------------------------------------------------------------------------------ the queue


def test_tens_of_thousands_wait_for_free(talk, monkeypatch):
    """A queued prompt holds its text: it is tokenised when its turn comes, and costs the device nothing."""
    encoded, real = collections.Counter(), Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **options: (encoded.update([text]), real(self, text, **options))[1]
    )
    prompts = [f"abc {'abc' * (i % 5)} {i}" for i in range(20_000)]
    tracemalloc.start()
    requests = new_requests(prompts, free(1))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(requests) < 1200
    stream = talk.plain.run(requests, 3)
    for _ in range(30):
        next(stream)
    stream.close()
    ended = sum(request.ended for request in requests)
    assert ended and len(encoded) == encoded.total() <= ended + talk.plain.max_slots + 1
    assert sum(bool(request.prompt_ids) for request in requests) == len(encoded)


def test_a_long_prompt_does_not_stall_the_others(talk, unshared):
    """Its chunks alternate with the others' rounds."""
    prompts, params = [words(1, 3), words(2, 52), words(3, 3)], [free(0, max_tokens=50), free(1, max_tokens=6), free(2)]
    done = run(talk.plain, prompts, params)
    order = [index for index, *_ in done.events]
    # 51 tokens are seven chunks; the host is one dispatch behind.
    assert order[: order.index(1)].count(0) >= 5 and order[: order.index(1)].count(2) >= 5
    assert done.tokens == unshared(prompts, params) == run(talk.whole, prompts, params).tokens


# ------------------------------------------------------------------------------------------------------ shared prefixes


@pytest.fixture(scope="module")
def drafting(talk, tiny_drafter, tiny_eagle) -> dict[str, Engine]:
    """Engines without a drafter and with drafters that listen to their context."""
    with jax.enable_x64(True):
        options = {"sampler": "coupled", "max_slots": 3, "rounds_per_dispatch": 3, "page_size": PAGE}
        block, eagle = tiny_drafter(talk.target, "random", block=3), tiny_eagle(talk.target)
        return {
            "plain": talk.plain,
            "block": Engine(talk.target, block, **options),
            "eagle": Engine(talk.target, eagle, **options),
        }


@pytest.fixture
def engine_of(drafting):
    """engine_of(name): an engine that has cached no prompt yet."""

    def get(name: str) -> Engine:
        engine = drafting[name]
        engine.pages = PageAllocator(engine.pages.total)
        return engine

    return get


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Prompt tokens that each prefill program was given."""
    rows, real = [], engine_module.prefill

    def counting(models, weights, caches, table, tokens, following, start, count, carry, **options):
        rows.append(int(np.sum(count)))
        return real(models, weights, caches, table, tokens, following, start, count, carry, **options)

    monkeypatch.setattr(engine_module, "prefill", counting)
    return rows


def hot(i: int, **changes) -> SamplingParams:
    """So much noise that any drafter which shares it is often right."""
    return free(i, temperature=3.0, **changes)


SYSTEM = words(20, 21)  # five pages and a token
FAMILY = [SYSTEM + words(30 + i, 2 + i) for i in range(7)]


@pytest.mark.parametrize("name", ["plain", "block", "eagle"])
def test_a_shared_prefix_is_computed_once(engine_of, unshared, computed, name):
    """I1, I2: with a drafter as often as without, for requests that come together and for later ones."""
    params = [hot(i) for i in range(len(FAMILY))]
    cold = [
        run(engine_of(name), [prompt], own).requests[0].completion for prompt, own in zip(FAMILY, params, strict=True)
    ]
    engine = engine_of(name)
    computed.clear()
    together = run(engine, FAMILY, params)
    shared = 5 * PAGE
    assert sum(computed) == len(FAMILY[0]) - 1 + sum(len(prompt) - 1 - shared for prompt in FAMILY[1:])
    computed.clear()
    again = run(engine, FAMILY, params)
    whole_pages = [((len(prompt) - 1 - (name == "eagle")) // PAGE) * PAGE for prompt in FAMILY]
    assert sum(computed) == sum(len(p) - 1 - pages for p, pages in zip(FAMILY, whole_pages, strict=True))
    assert together.tokens == again.tokens == unshared(FAMILY, params) == [c.token_ids for c in cold]
    for done in (together, again):
        assert [r.completion.accepted for r in done.requests] == [c.accepted for c in cold]
    if name != "plain":
        accepted = [c.accepted for c in cold]
        assert np.mean(np.concatenate(accepted) > 0) > 0.3
        # The control: were the drafter's rows of the prefix lost, this test would see it.
        engine.caches = engine.caches.replace(draft=jax.tree.map(np.zeros_like, engine.caches.draft))
        deaf = run(engine, FAMILY, params)
        assert deaf.tokens == again.tokens and [r.completion.accepted for r in deaf.requests] != accepted


@pytest.mark.parametrize(("name", "rows"), [("block", 2 * PAGE), ("eagle", PAGE)])
def test_the_token_after_a_page(engine_of, unshared, computed, name, rows):
    """Eagle3's last row of a page reads the token behind it: a page is shared only where that is the same too."""
    first, second = words(40, 2 * PAGE) + [1, 2, 3, 4], words(40, 2 * PAGE) + [5, 2, 3, 4]
    cold = run(engine_of(name), [second], hot(1)).requests[0].completion
    engine = engine_of(name)
    run(engine, [first], hot(0))
    computed.clear()
    warm = run(engine, [second], hot(1)).requests[0].completion
    assert sum(computed) == len(second) - 1 - rows
    assert (warm.token_ids, warm.accepted) == (cold.token_ids, cold.accepted)
    assert [warm.token_ids] == unshared([second], hot(1))


@pytest.mark.parametrize("name", ["block", "eagle"])
def test_the_same_prompt_again(engine_of, unshared, computed, name):
    """Every length around a page's end: nothing or next to nothing is left to compute."""
    prompts = [words(50, n) for n in range(2 * PAGE - 1, 3 * PAGE + 3)]
    cold = [run(engine_of(name), [prompt], hot(7)).requests[0].completion for prompt in prompts]
    for prompt, before in zip(prompts, cold, strict=True):
        engine = engine_of(name)
        run(engine, [prompt], hot(6))
        computed.clear()
        after = run(engine, [prompt], hot(7)).requests[0].completion
        assert sum(computed) <= PAGE and (after.token_ids, after.accepted) == (before.token_ids, before.accepted)
    assert [c.token_ids for c in cold] == unshared(prompts, hot(7))


def test_few_pages_for_many_prefixes(talk, unshared, computed):
    """Prefixes are evicted and computed anew, requests wait for pages, and no answer is any other for it."""
    engine = talk.whole
    taken = engine.pages.take(engine.pages.total - 24)
    rng = np.random.default_rng(0)
    families = [words(60 + i, 5 * PAGE) for i in range(4)]
    prompts = [
        families[int(rng.integers(4))][: rng.integers(1, 21)] + words(i, int(rng.integers(1, 12))) for i in range(40)
    ]
    params = [
        hot(i, max_tokens=(4, 12, 40)[i % 3]) if len(p) < 20 else hot(i, max_tokens=9) for i, p in enumerate(prompts)
    ]
    done = run(engine, prompts, params)
    rows = sum(computed)
    assert done.tokens == unshared(prompts, params)
    assert engine.pages.available == 24
    engine.pages.give(taken)
    everything = sum(len(prompt) - 1 for prompt in prompts)
    assert 0.3 * everything < rows < 0.9 * everything

"""The engine: ends of requests, queue and slots, pages, seeds, streams, compilations, bad input. All in float64."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, EOS, LONG = 41, 7, 24


@dataclasses.dataclass
class Setting:
    """One target and drafter; engines are shared by all tests, so that their programs are compiled once."""

    target: object
    drafter: object
    plain: Engine  # no speculation
    engine: Engine  # whole blocks, coupled: equal to `plain` token for token
    rejection: Engine  # two drafts a round

    @property
    def engines(self):
        return self.plain, self.engine, self.rejection


@pytest.fixture(scope="module")
def s(tiny_target, tiny_drafter) -> Setting:
    with jax.enable_x64(True):
        target = tiny_target(vocab=VOCAB, eos=(EOS,))
        drafter = tiny_drafter(target, block=3)
        return Setting(
            target, drafter, Engine(target, strategy="off", max_slots=2, rounds_per_dispatch=2),
            Engine(target, drafter, sampler="coupled", max_slots=4, rounds_per_dispatch=2),
            Engine(target, drafter, strategy="fixed:2", max_slots=2, rounds_per_dispatch=2),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def pages_come_back(s):
    """Whatever a test does, its engines hold no page afterwards, and no page is held twice."""
    yield
    for engine in s.engines:
        assert not engine.pages._users and engine.pages.available == engine.pages.total


def prompt(i: int) -> list[int]:
    return np.random.default_rng(100 + i).integers(0, VOCAB, 3 + i % 6).tolist()


def free(i: int, **changes) -> SamplingParams:
    """Parameters of request i, which nothing but its length ends."""
    base = {"temperature": (0.0, 0.8, 1.2)[i % 3], "seed": i, "max_tokens": LONG, "ignore_eos": True}
    return SamplingParams(**(base | changes))


@pytest.fixture(scope="module")
def unbounded(s) -> list[list[int]]:
    """Plain decoding of 6 requests that nothing stops."""
    with jax.enable_x64(True):
        return [c.token_ids for c in s.plain.generate([prompt(i) for i in range(6)], [free(i) for i in range(6)])]


def first_times(tokens: list[int]) -> list[int]:
    """Places where a token occurs for the first time: as a stop token it would end the request right there."""
    return [i for i, t in enumerate(tokens) if t not in tokens[:i]]


# --------------------------------------------------------------------------------------------------- ends of requests


def test_stop_token_anywhere_in_a_block(s, unbounded):
    """F1: the answer ends at the stop token, wherever in an accepted block it stands, and nothing follows."""
    cases = [(r, i) for r, tokens in enumerate(unbounded) for i in first_times(tokens)]
    outs = s.engine.generate(
        [prompt(r) for r, _ in cases], [free(r, stop_token_ids=(unbounded[r][i],)) for r, i in cases]
    )
    inside = 0
    for (r, i), out in zip(cases, outs, strict=True):
        assert out.token_ids == unbounded[r][: i + 1] and out.finish_reason == "stop"
        inside += sum(out.accepted) + len(out.accepted) == len(out.token_ids) + 1  # the last round had no bonus
    assert inside > 5


@pytest.mark.parametrize("r", [0, 1])
def test_every_token_limit(s, unbounded, r):
    outs = s.engine.generate([prompt(r)] * 12, [free(r, max_tokens=n) for n in range(1, 13)])
    assert [c.token_ids for c in outs] == [unbounded[r][:n] for n in range(1, 13)]
    assert {c.finish_reason for c in outs} == {"length"}


def test_stop_token_at_the_limit_is_a_stop(s, unbounded):
    cases = [(r, i) for r, tokens in enumerate(unbounded) for i in first_times(tokens)[:4]]
    params = [free(r, stop_token_ids=(unbounded[r][i],), max_tokens=i + 1) for r, i in cases]
    assert {c.finish_reason for c in s.engine.generate([prompt(r) for r, _ in cases], params)} == {"stop"}


def test_end_token_of_the_model_and_ignore_eos(s):
    ends = [prompt(i) for i in range(12)]
    stopped = s.engine.generate(ends, [free(i, ignore_eos=False) for i in range(12)])
    ignored = s.engine.generate(ends, [free(i) for i in range(12)])
    assert {c.finish_reason for c in stopped} == {"stop", "length"}
    for a, b in zip(stopped, ignored, strict=True):
        end = b.token_ids.index(EOS) + 1 if EOS in b.token_ids else LONG
        assert len(b.token_ids) == LONG and a.token_ids == b.token_ids[:end]


def test_context_ends_an_answer(s):
    out = s.engine.generate([prompt(0) * 18], free(0, max_tokens=64))[0]
    assert len(prompt(0) * 18) + len(out.token_ids) == s.engine.context == 64 and out.finish_reason == "length"
    past = s.engine.generate([prompt(0)], free(0, max_tokens=65))[0]
    assert past.finish_reason == "error" and "max_tokens=65" in past.error


def test_rejected_stop_token_of_the_drafter_ends_nothing(s, unbounded, drafts_after):
    """F5: the drafter proposes stop tokens that the target does not say."""
    r = 0
    start, tokens = len(prompt(r)), prompt(r) + unbounded[r]
    drafted = drafts_after(s.target, s.drafter, tokens, range(start, len(tokens)), free(r), "coupled").token_RxK
    stops = tuple(sorted(set(drafted.ravel().tolist()) - set(unbounded[r])))[:8]
    assert stops
    out = s.engine.generate([prompt(r)], free(r, stop_token_ids=stops))[0]
    assert out.token_ids == unbounded[r] and out.finish_reason == "length"


# ---------------------------------------------------------------------------------------------------------- statistics


def test_round_statistics(s):
    params = [free(i, ignore_eos=i % 2 == 0, max_tokens=1 + 2 * i) for i in range(12)]
    for engine, drafts in ((s.engine, 3), (s.rejection, 2), (s.plain, 0)):
        for c in engine.generate([prompt(i) for i in range(12)], params):
            assert len(c.drafted) == len(c.verified) == len(c.accepted) > 0
            assert set(c.drafted) == set(c.verified) == {drafts}
            assert all(0 <= a <= v for a, v in zip(c.accepted, c.verified, strict=True))
            # Every round emits its accepted drafts and one more token; only the last one can be cut before that one.
            assert sum(c.accepted) + len(c.accepted) - len(c.token_ids) in (0, 1)
            assert c.tokens_per_round == len(c.token_ids) / len(c.accepted)


# ------------------------------------------------------------------------------------------------------ queue and slots


def test_more_prompts_than_slots_come_back_in_order(s):
    """K1: requests of many lengths move from slot to slot; each keeps its own text."""
    params = [free(i, max_tokens=(1, 20, 3, 9, 2)[i % 5]) for i in range(15)]
    together = s.engine.generate([prompt(i) for i in range(15)], params)
    for i in (0, 1, 7, 13, 14):
        assert together[i].token_ids == s.plain.generate([prompt(i)], params[i])[0].token_ids


def test_results_by_completion(s):
    params = [free(i, max_tokens=(2, 20)[i % 2]) for i in range(6)]
    outs = dict(s.engine.stream_completions([prompt(i) for i in range(6)], params))
    assert [outs[i].token_ids for i in range(6)] == [
        c.token_ids for c in s.engine.generate([prompt(i) for i in range(6)], params)
    ]


def test_no_prompts(s):
    assert s.engine.generate([]) == [] and list(s.engine.stream([])) == []


def test_abandoned_stream_leaves_a_clean_engine(s, unbounded):
    prompts, params = [prompt(i) for i in range(6)], [free(i) for i in range(6)]
    for events in (1, 3, 9):
        stream = s.engine.stream(prompts, params, rounds_per_dispatch=2)
        for _ in range(events):
            next(stream)
        stream.close()
        assert [c.token_ids for c in s.engine.generate(prompts[::-1], params[::-1])] == unbounded[::-1]


def test_two_streams_at_once_are_refused(s):
    first = s.engine.stream([prompt(0)], free(0), rounds_per_dispatch=2)
    next(first)
    with pytest.raises(UserError, match="already generating"):
        next(s.engine.stream([prompt(1)], free(1)))
    with pytest.raises(UserError, match="already generating"):
        s.engine.generate([prompt(1)], free(1))
    assert sum(len(e.token_ids) for e in first) > 0  # the first goes on


def test_bad_request_among_good_ones_harms_nobody(s, unbounded):
    bad = {1: [VOCAB], 3: [], 4: [1] * 64}
    outs = s.engine.generate([bad.get(i, prompt(i)) for i in range(6)], [free(i) for i in range(6)])
    for i, out in enumerate(outs):
        if i in bad:
            assert out.finish_reason == "error" and out.error and not out.token_ids
        else:
            assert out.token_ids == unbounded[i] and not out.error


def test_error_within_a_run_gives_the_pages_back(s, unbounded, monkeypatch):
    def fail(self, dispatch):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_collect", fail)
        with pytest.raises(RuntimeError):
            s.engine.generate([prompt(0)], free(0))
    assert s.engine.generate([prompt(0)], free(0))[0].token_ids == unbounded[0]


def test_pages_for_one_request_at_a_time(s, unbounded):
    """Three pages: every request needs two or three, so each waits for the one before it."""
    engine = Engine(s.target, s.drafter, sampler="coupled", max_slots=4, cache_tokens=48, rounds_per_dispatch=2)
    outs = engine.generate([prompt(i) for i in range(6)], [free(i) for i in range(6)])
    assert [c.token_ids for c in outs] == unbounded
    assert engine.pages.available == 3


# --------------------------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("name", ["plain", "engine", "rejection"])
def test_seed_alone_and_in_company(s, name):
    """D5: a request's tokens do not depend on who runs beside it."""
    engine = getattr(s, name)
    params = [free(i, temperature=1.0) for i in range(8)]
    together = engine.generate([prompt(i) for i in range(8)], params)
    for i in (0, 5):
        assert engine.generate([prompt(i)], params[i])[0].token_ids == together[i].token_ids


@pytest.mark.parametrize("name", ["plain", "engine", "rejection"])
def test_different_seeds_differ(s, name):
    seeds = (0, 1, 1 << 32, (1 << 32) + 1, -1, None, None)  # both words of the 64 bits count
    outs = getattr(s, name).generate([prompt(0)] * len(seeds), [free(0, temperature=1.0, seed=seed) for seed in seeds])
    assert len({tuple(c.token_ids) for c in outs}) == len(seeds)


# ------------------------------------------------------------------------------------------------------- text, streams


@pytest.fixture(scope="module")
def spelling(s) -> Tokenizer:
    """Byte-level tokens: letters, an end token, and single bytes of multi-byte characters."""
    bytes_ = ["Ã", "©", "â", "Ĥ", "¬"]  # C3 A9, E2 82 AC in GPT-2's byte alphabet
    texts = (
        [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(VOCAB - 26 - len(bytes_))] + bytes_
    )
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(backend, {"eos_token": texts[EOS]}, None, "test")


def test_stream_deltas_add_up_to_the_text(s, spelling):
    target = dataclasses.replace(s.target, tokenizer=spelling)
    engine = Engine(target, s.drafter, sampler="coupled", max_slots=4, rounds_per_dispatch=2)
    params = [free(i, temperature=1.3, ignore_eos=i % 2 == 0) for i in range(8)]
    outs = engine.generate(["abc"] * 8, params)
    texts, tokens, reasons = [""] * 8, [[] for _ in range(8)], [None] * 8
    for request, delta, ids, reason in engine.stream(["abc"] * 8, params, rounds_per_dispatch=2):
        assert reasons[request] is None  # nothing after the end
        texts[request] += delta
        tokens[request] += ids
        reasons[request] = reason
    assert (texts, tokens, reasons) == (
        [c.text for c in outs],
        [c.token_ids for c in outs],
        [c.finish_reason for c in outs],
    )
    assert texts == [spelling.decode(c.token_ids) for c in outs]
    assert any("\ufffd" in t for t in texts) and "stop" in reasons


# -------------------------------------------------------------------------------------------------------- compilations


def test_nothing_is_compiled_twice(s):
    def programs():
        return round_module.decode._cache_size(), round_module.prefill._cache_size()

    def asking(more: int) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=0.5 + i, top_k=i, top_p=1 - i / 10, min_p=i / 20, seed=more + i,
                           max_tokens=3 + 3 * i, stop_token_ids=range(i)) for i in range(6)
        ]  # fmt: skip

    prompts = [prompt(i) for i in range(6)]
    s.engine.generate(prompts, asking(99))  # programs can do from here on what a request has asked for once
    for count in (1, 6):
        s.engine.generate(prompts[:count], [free(i) for i in range(count)])
    before = programs()
    s.engine.generate([p[::-1] for p in prompts], asking(7))
    other = Engine(s.target, s.drafter, sampler="coupled", max_slots=4, rounds_per_dispatch=2)
    other.generate(prompts[:1], [dataclasses.replace(free(0), temperature=0.7, top_p=0.9)])
    assert programs() == before


# ----------------------------------------------------------------------------------------------------------- bad input


def one_line(error) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fast"}, "unknown strategy 'fast'"),
        ({"strategy": "fixed:0"}, "fixed:0"),
        ({"strategy": "fixed:99"}, "fixed:99"),
        ({"strategy": "fixed:"}, "fixed:"),
        ({"strategy": "fixed:-1"}, "fixed:-1"),
        ({"strategy": "fixed:2", "drafter": None}, "needs a drafter"),
        ({"sampler": "greedy"}, "unknown sampler 'greedy'"),
        ({"max_slots": 0}, "max_slots"),
        ({"page_size": 0}, "page_size"),
        ({"rounds_per_dispatch": 0}, "rounds_per_dispatch"),
    ],
)
def test_bad_engine(s, options, words):
    with pytest.raises(UserError, match=words) as error:
        Engine(s.target, **({"drafter": s.drafter} | options))
    assert one_line(error)


def test_drafter_of_another_target(s, tiny_target):
    """ "Raises UserError on parts that do not fit together"."""
    other = tiny_target(vocab=VOCAB + 1)
    with pytest.raises(UserError, match="another target") as error:
        Engine(other, s.drafter)
    assert one_line(error)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1] * 64], "prompt 0 has 64 tokens"), ([[]], "empty prompt"), ([[VOCAB]], f"{VOCAB} is outside"),
        ([[-1]], "-1 is outside"), (["text"], "no tokenizer"), ([[{"role": "user", "content": "hi"}]], "no tokenizer"),
    ],
)  # fmt: skip
def test_bad_prompts(s, prompts, words):
    (out,) = s.engine.generate(prompts)
    assert out.finish_reason == "error" and words in out.error and "\n" not in out.error


def test_wrong_number_of_params(s):
    with pytest.raises(UserError, match="2 prompts, but 3") as error:
        s.engine.generate([[1], [2]], [SamplingParams()] * 3)
    assert one_line(error)


def test_too_many_stop_tokens(s):
    (out,) = s.engine.generate([[1]], SamplingParams(stop_token_ids=range(10, 19), max_tokens=4))
    assert out.finish_reason == "error" and "10 stop tokens" in out.error


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"min_p": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": -3},
    ],
    ids=str,
)
def test_bad_sampling_params(bad):
    with pytest.raises(UserError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert one_line(error)

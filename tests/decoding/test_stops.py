"""Stop strings: text, tokens, logprobs and statistics end at one place, whatever straddles tokens and rounds."""

import codecs
import dataclasses
import itertools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stops import StopText
from dspark_jax.interop.tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------------------- the text alone


def byte_fallback() -> Tokenizer:
    """Tokens as of SentencePiece: pieces of words, and single bytes, which are judged as a run."""
    texts = ["a", "b", "ab", "▁a", "X", *(f"<0x{byte:02X}>" for byte in b"\xc3\xa9\xe2\x82\xac\xff"), "<note>"]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=None, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<note>"])
    return Tokenizer(backend, {}, None, "test")


FALLBACK = byte_fallback()
STOPS = st.lists(st.text("abcX é€\ufffd", min_size=1, max_size=3), max_size=4)
# Pieces of é and €, of words, and the token without text.
TOKENS = ["a", "b", "ab", "abc", "aĠb", "Ã", "©", "â", "Ĥ", "¬", "bÃ", "©c", "Ĥ¬", "aâ", "Ã©", "¬dÃ", "<note>"]


def spoken_bytes(spelling: Tokenizer, ids: list[int]) -> bytes:
    """What tokens stand for, from their spelling."""
    alphabet = {"Ġ": 0x20, "Ã": 0xC3, "©": 0xA9, "â": 0xE2, "Ĥ": 0x82, "¬": 0xAC}
    texts = [spelling.token_text(i) for i in ids if i not in spelling.special_ids]
    return bytes(alphabet.get(char) or ord(char) for text in texts for char in text)


def oracle(spelling: Tokenizer, ids: list[int], stops, min_tokens: int = 0) -> tuple[str, int | None]:
    """The text of an answer and the token at which plain decoding sees the stop string; None: it sees none.

    After each token it looks through the whole text; nothing that begins in the first `min_tokens` tokens counts.
    """
    settled = lambda n: codecs.utf_8_decode(spoken_bytes(spelling, ids[:n]), "replace", False)  # noqa: E731
    protected, consumed = settled(min_tokens) if min_tokens else ("", 0)
    first = len(protected) + (consumed < len(spoken_bytes(spelling, ids[:min_tokens])))
    whole = spelling.decode(ids)
    for n in [*range(min_tokens + 1, len(ids) + 1), None]:
        text = whole if n is None else settled(n)[0]
        found = [place for place in (text.find(stop, first) for stop in stops) if place >= 0]
        if found:
            return text[: min(found)], n or len(ids)
    return whole, None


def check_kept(tokenizer: Tokenizer, ids: list[int], text: str, kept: int, min_tokens: int = 0) -> None:
    """As few tokens as hold the text, but for some without text of their own."""
    assert tokenizer.decode(ids[:kept]).startswith(text)
    if kept > min_tokens and tokenizer.decode(ids[: kept - 1]).startswith(text):
        assert tokenizer.decode(ids[:kept]) == text


@dataclasses.dataclass
class Seen:
    text: str
    stopped_at: int | None
    kept: int
    shown: list[str]  # after each token
    settled: list[int]


def push_all(tokenizer: Tokenizer, ids: list[int], stops, min_tokens: int = 0) -> Seen:
    state, shown, settled = StopText(tokenizer, stops), [""], [0]
    for n, token in enumerate(ids, 1):
        shown.append(shown[-1] + state.push(token, n > min_tokens))
        settled.append(state.settled)
        if state.stopped:
            break
    if not state.stopped:
        shown.append(shown[-1] + state.flush(len(ids) > min_tokens))
        settled.append(state.settled)
    kept = state.kept() if state.stopped else state.settled
    return Seen(state.text, n if state.stopped else None, kept, shown, settled)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stops=STOPS, min_tokens=st.integers(0, 6))
def test_text_against_the_oracle(spelling, data, stops, min_tokens):
    ids = [spelling.token_id(t) for t in data.draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12))]
    min_tokens = min(min_tokens, len(ids))
    text, stopped_at = oracle(spelling, ids, stops, min_tokens)
    seen = push_all(spelling, ids, stops, min_tokens)
    assert (seen.text, seen.stopped_at) == (text, stopped_at)
    if stopped_at is None:
        assert seen.kept == len(ids)
    else:
        assert seen.kept >= min_tokens
        check_kept(spelling, ids, text, seen.kept, min_tokens)
    check_stream(spelling, ids, seen)
    # Nothing is held back that no stop string could take.
    for n in range(min_tokens + 1, stopped_at or len(ids)):
        known = codecs.utf_8_decode(spoken_bytes(spelling, ids[:n]), "replace", False)[0]
        held = known[len(seen.shown[n]) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def check_stream(tokenizer: Tokenizer, ids: list[int], seen: Seen) -> None:
    """What was shown stays; tokens are settled in order, none that the answer does not keep, none before its text."""
    assert seen.shown[-1] == seen.text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen.shown))
    assert seen.settled == sorted(seen.settled) and seen.settled[-1] <= seen.kept
    for shown, settled in zip(seen.shown, seen.settled, strict=True):
        assert shown.startswith(tokenizer.decode(ids[:settled]))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, FALLBACK.vocab_size - 1), min_size=1, max_size=10), stops=STOPS)
@example(ids=[5, 6, 4], stops=["X"])  # é in bytes, then the stop string
@example(ids=[5, 6, 5, 6, 4], stops=["éX"])
def test_text_of_byte_runs(ids, stops):
    seen = push_all(FALLBACK, ids, stops)
    whole = FALLBACK.decode(ids[: seen.stopped_at])
    if seen.stopped_at is None:
        assert seen.text == whole and seen.kept == len(ids)
    else:
        assert any(whole.startswith(seen.text + stop) for stop in stops)
        check_kept(FALLBACK, ids, seen.text, seen.kept)
    assert not any(stop in seen.text for stop in stops)
    check_stream(FALLBACK, ids, seen)


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "kept"),
    [
        (["a", "b", "c"], ["bc"], "a", 1),
        (["ab", "c"], ["bc"], "a", 1),  # the first token holds text before the stop string
        (["abc"], ["bc"], "a", 1),
        (["abc"], ["abc"], "", 0),
        (["a", "b", "c", "d"], ["abx", "cd"], "ab", 2),
        (["a", "ab", "ab", "c"], ["abc"], "aab", 2),
        (["abc"], ["c", "b", "abcd"], "a", 1),  # the earliest, not the first of the list
        (["a", "Ã", "©c"], ["é"], "a", 1),
        (["a", "Ã", "©c"], ["c"], "aé", 3),  # the last token holds part of é
        (["bÃ", "©"], ["é"], "b", 1),
        (["â", "Ĥ", "¬", "a"], ["a"], "€", 3),
        (["Ã", "a"], ["a"], "\ufffd", 1),
        (["a", "<note>", "b"], ["b"], "a", 2),
    ],
)
def test_where_a_stop_string_ends_the_tokens(spelling, tokens, stops, text, kept):
    seen = push_all(spelling, [spelling.token_id(t) for t in tokens], stops)
    assert (seen.text, seen.kept) == (text, kept)


def test_no_work_is_done_again(spelling):
    """Time per token does not grow with the answer."""
    state = StopText(spelling, ["zzz", "ab€"])
    for _ in range(20_000):
        state.push(0)
    assert state.settled == 19_999 and len(state._ends) == 1


# ----------------------------------------------------------------------------------------------------- in the engine

ANSWER = 20
PROMPTS = ["abc", "b fg", "Cab", "op", "hiji", "a"]
ENGINES = ("plain", "whole", "two")


@pytest.fixture(autouse=True)
def tiny(request):
    """Tests of the engine share a few programs; the others need none."""
    if "talk" in request.fixturenames:
        for name in ("x64", "few_programs", "pages_come_back"):
            request.getfixturevalue(name)


def free(i: int, **changes) -> SamplingParams:
    base = {"temperature": (0.0, 0.9, 1.3)[i % 3], "seed": i, "max_tokens": ANSWER, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**(base | changes))


def unbounded(engine):
    return engine.generate(PROMPTS, [free(i) for i in range(len(PROMPTS))])


def pieces(text: str) -> list[str]:
    """Stop strings of one to four characters from all over a text."""
    return [text[i : i + 1 + i % 4] for i in range(0, len(text), 2)]


@pytest.mark.parametrize("name", ENGINES)
def test_everything_ends_at_one_place(talk, spelling, name):
    """F3, F6: text, tokens, logprobs, rounds and the stream of an answer that a stop string ends."""
    engine = getattr(talk, name)
    cases = [(i, out, stop) for i, out in enumerate(unbounded(engine)) for stop in pieces(out.text)]
    prompts, params = [PROMPTS[i] for i, *_ in cases], [free(i, stop=(stop, "never")) for i, _, stop in cases]
    outs = engine.generate(prompts, params)
    straddling = 0
    for out, (_, base, stop) in zip(outs, cases, strict=True):
        text, stopped_at = oracle(spelling, base.token_ids, [stop])
        count, rounds = len(out.token_ids), len(out.accepted)
        assert (out.text, out.finish_reason) == (text, "stop") and stop not in text
        check_kept(spelling, base.token_ids, text, count)
        assert out.token_ids == base.token_ids[:count] and out.logprobs == base.logprobs[:count]
        assert len(out.drafted) == len(out.verified) == rounds
        assert out.verified == base.verified[:rounds] and out.accepted[:-1] == base.accepted[: max(rounds - 1, 0)]
        assert sum(out.accepted) + rounds - count in (0, 1)
        ends = list(itertools.accumulate(a + 1 for a in base.accepted))
        straddling += any(count < end < stopped_at for end in ends)
    assert straddling > 5
    check_events(engine.stream(prompts, params, rounds_per_dispatch=3), outs)


def check_events(events, outs) -> None:
    """Events add up to the completions and end with them."""
    texts, tokens, reasons = [""] * len(outs), [[] for _ in outs], [None] * len(outs)
    for request, delta, ids, reason in events:
        assert reasons[request] is None
        texts[request] += delta
        tokens[request] += ids
        reasons[request] = reason
    assert texts == [c.text for c in outs] and tokens == [c.token_ids for c in outs]
    assert reasons == [c.finish_reason for c in outs]


@pytest.mark.parametrize("name", ENGINES)
def test_token_limit_around_a_stop_string(talk, spelling, name):
    """A stop string that is complete at the limit is a stop; one that is not stays in the text."""
    engine = getattr(talk, name)
    cases = [(i, base, stop) for i, base in enumerate(unbounded(engine)) for stop in pieces(base.text)[1::3]]
    limits = [
        max(1, oracle(spelling, base.token_ids, [stop])[1] + (k % 3) - 1) for k, (_, base, stop) in enumerate(cases)
    ]
    params = [free(i, stop=stop, max_tokens=n) for (i, _, stop), n in zip(cases, limits, strict=True)]
    outs = engine.generate([PROMPTS[i] for i, *_ in cases], params)
    for out, (_, base, stop), limit in zip(outs, cases, limits, strict=True):
        text, stopped_at = oracle(spelling, base.token_ids[:limit], [stop])
        assert (out.text, out.finish_reason) == (text, "length" if stopped_at is None else "stop")
        if stopped_at is None:
            assert out.token_ids == base.token_ids[:limit]
    assert {out.finish_reason for out in outs} == {"length", "stop"}


@pytest.mark.parametrize("name", ENGINES)
def test_min_tokens_and_stop_strings(talk, spelling, name):
    """No stop string counts that begins in the first `min_tokens` tokens."""
    engine = getattr(talk, name)
    # min_tokens forbids no token here but the stop tokens, of which there are none.
    cases = [(i, base, pieces(base.text)[k], k) for i, base in enumerate(unbounded(engine)) for k in (0, 2, 5)]
    params = [free(i, stop=stop, min_tokens=2 * k) for i, _, stop, k in cases]
    outs = engine.generate([PROMPTS[i] for i, *_ in cases], params)
    for out, (_, base, stop, k) in zip(outs, cases, strict=True):
        text, stopped_at = oracle(spelling, base.token_ids, [stop], 2 * k)
        assert (out.text, out.finish_reason) == (text, "length" if stopped_at is None else "stop")
        assert len(out.token_ids) >= 2 * k and out.token_ids == base.token_ids[: len(out.token_ids)]


def test_stop_token_inside_a_partial_stop_string(talk, spelling):
    """The end token ends the answer, and the text that was held back comes out."""
    base = unbounded(talk.plain)[1]
    at = next(n for n in range(3, ANSWER) if base.token_ids[n] not in base.token_ids[:n])
    ids = base.token_ids[: at + 1]
    stop = spelling.decode(ids)[-2:] + "never"
    (out,) = talk.whole.generate([PROMPTS[1]], [free(1, stop=stop, stop_token_ids=(ids[-1],))])
    assert (out.token_ids, out.text, out.finish_reason) == (ids, spelling.decode(ids), "stop")


def test_a_stopped_request_frees_its_slot_and_harms_nobody(talk):
    lengths = [ANSWER, ANSWER, 55, ANSWER, ANSWER, ANSWER]
    bases = talk.whole.generate(PROMPTS, [free(i, max_tokens=n) for i, n in enumerate(lengths)])
    stops = {0: bases[0].text[4:6], 1: bases[1].text[2:4]}
    params = [free(i, max_tokens=n, stop=stops.get(i, "never")) for i, n in enumerate(lengths)]
    ended, first = [], {}
    for request, *_, reason in talk.whole.stream(PROMPTS, params, rounds_per_dispatch=3):
        first.setdefault(request, len(ended))
        if reason:
            ended.append(request)
    # Three slots: the fourth request starts when one of the first has stopped, while the third goes on.
    assert ended.index(0) < first[3] <= ended.index(2)
    outs = talk.whole.generate(PROMPTS, params)
    assert [out.text for out in outs[2:]] == [base.text for base in bases[2:]]

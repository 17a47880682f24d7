"""Drafting by lookup: copied text gains, no token changes, and running acceptance stands in for confidences."""

import dataclasses

import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.profiling import drafter_fingerprint
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import SlotSchedule
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, load_drafter
from dspark_jax.interop.released import released_for
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, Rope
from dspark_jax.models.lookup import Lookup
from dspark_jax.scheduling.scheduler import RoundCost, row_buckets
from tests.decoding.laws import FAIL, PASS
from tests.decoding.loads import (
    ANSWER,
    BLOCK,
    LOADS,
    PAGE,
    SIZE,
    VOCAB,
    answer_law,
    answers,
    engine_of,
    every_load,
    filled,
    fit,
)

# ---------------------------------------------------------------------------------------------------- the match

SEARCH = jax.jit(Lookup(num_drafts=5, longest=3).continuation)


def by_hand(text: list[int]) -> tuple[list[int], int]:
    """The drafts after a text and the length of the n-gram they follow; the slow and obvious way."""
    for n in (3, 2, 1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[len(text) - n :]:
                copied = list(text)
                while len(copied) < len(text) + 5:
                    copied.append(copied[end + 1 + len(copied) - len(text)])
                return copied[len(text) :], n
    return [], 0


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(0, 3))
def test_drafts_follow_the_latest_of_the_longest_matches(text, rest):
    """Whatever stands behind the text: rows of a slot's history are written over, never cleared."""
    row = np.array([text + [rest] * (16 - len(text))], np.int32)
    drafts, match = SEARCH(row, np.array([len(text)]))
    wanted, length = by_hand(text)
    assert match[0] == length
    if length:
        assert drafts[0].tolist() == wanted


# ---------------------------------------------------------------------------------------------------- token for token

WORDS, LONGEST = 13, 48  # words of the vocabulary, tokens of the context
SHAPE = {"vocab": WORDS, "hidden": 16, "layers": 3, "max_length": LONGEST}
OPTIONS = {"max_slots": 6, "rounds_per_dispatch": 48}


def requests():
    """Copied and random prompts, one token alone, and two that run into the end of the context."""
    rng = np.random.default_rng(1)
    prompts = [[1, 2, 3, 4] * 4, rng.integers(0, WORDS, 19).tolist(), [5], [5], [7, 8] * 22, [3]]
    temperatures = (0.0, 0.7, 0.0, 1.0, 0.3, 0.0)
    return prompts, [SamplingParams(temperature=t, seed=i, max_tokens=LONGEST) for i, t in enumerate(temperatures)]


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    with jax.enable_x64(True):
        return tiny_target(**SHAPE)


@pytest.fixture(scope="module")
def plain(target):
    with jax.enable_x64(True):
        return Engine(target, strategy="off", sampler="coupled", **OPTIONS).generate(*requests())


@pytest.mark.usefixtures("x64")
class TestTokenForToken:
    def test_coupled_answers_are_those_of_plain_decoding_with_no_program_more_for_other_prompts(self, target, plain):
        engine = Engine(target, "lookup", sampler="coupled", **OPTIONS)
        assert engine.policy.strategy == ("threshold", 0.3)
        outs, programs = engine.generate(*requests()), decode._cache_size()
        assert [c.token_ids for c in outs] == [c.token_ids for c in plain]
        assert sum(sum(c.accepted) for c in outs) > 20
        prompts, params = requests()
        engine.generate([prompt[::-1] for prompt in prompts], params)
        assert decode._cache_size() == programs

    def test_greedy_answers_of_the_rejection_sampler_in_refilled_slots(self, target, plain):
        engine = Engine(target, "lookup", strategy="fixed:3", max_slots=2, rounds_per_dispatch=1, page_size=4)
        outs = engine.generate(*requests())
        for i in (0, 2, 5):
            assert outs[i].token_ids == plain[i].token_ids
        assert all(c.verified[0] == 0 for c in outs[2:4])  # nothing to look up yet, nothing to pay for

    def test_eagle3_is_scheduled_by_running_acceptance(self, target, plain, tiny_eagle):
        engine = Engine(target, tiny_eagle(target), strategy="threshold:0.4", sampler="coupled", **OPTIONS)
        outs = engine.generate(*requests())
        assert [c.token_ids for c in outs] == [c.token_ids for c in plain]
        lengths = np.concatenate([c.verified for c in outs])
        assert lengths.min() == 0 and lengths.max() == 3

    def test_its_rounds_are_measured_as_anybodys(self, target, plain):
        engine = Engine(target, "lookup", strategy="load_aware", sampler="coupled", max_slots=1, page_size=LONGEST)
        assert {rows for rows, *_ in engine.load.table.target} == set(row_buckets(1, 7))
        prompts, params = requests()
        assert engine.generate(prompts[:1], params[:1])[0].token_ids == plain[0].token_ids


def test_a_text_that_repeats_itself_gains(tiny_target):
    """A target that counts in a circle: after one turn, every draft is right."""
    target = tiny_target("float32", **SHAPE)
    head = {"kernel": jnp.roll(target.params["embedding"], 1, axis=0).T}
    layers = jax.tree.map(jnp.zeros_like, target.params["layers"])
    target = dataclasses.replace(target, params={**target.params, "lm_head": head, "layers": layers})
    engine = Engine(target, "lookup", strategy="fixed:7", max_slots=1, rounds_per_dispatch=48)
    (out,) = engine.generate([list(range(WORDS))], SamplingParams(temperature=0.0, max_tokens=32))
    assert out.token_ids == [i % WORDS for i in range(32)]
    assert out.tokens_per_round > 4


# ---------------------------------------------------------------------------------------------------- the law

PROMPTS = [[3, 1, 3], [2, 0, 2, 2], [0]]
PARAMS = [SamplingParams(temperature=t, top_k=k, max_tokens=ANSWER) for t, k in ((1.0, 0), (0.0, 0), (0.8, 4))]
BY_CONFIDENCE = ("threshold:0.5", "load_aware", "load_aware_async")


@pytest.fixture(scope="module")
def speaker(tiny_target) -> Target:
    """Its law depends on all tokens so far, and it likes to repeat itself."""
    sizes = {"num_heads": 2, "attention": (Attention(1, 4, Rope(10000.0)),), "max_length": PAGE}
    return tiny_target("float32", VOCAB, 8, layers=1, sharpness=1.5, context=1.0, **sizes)


@pytest.fixture(scope="module")
def pieces(speaker, tiny_drafter) -> dict[str, Drafter]:
    block = tiny_drafter(speaker, "bigram", BLOCK, noise=0.8, layer_kinds=(0,))
    config = dataclasses.replace(block.config, confidence=False, confidence_with_markov=False)
    params = {name: value for name, value in block.params.items() if name != "confidence_head"}
    return {
        "lookup": Drafter(Lookup(BLOCK, longest=2)),
        "block without confidences": Drafter(config, params, block.borrowed),
    }


@pytest.fixture(scope="module")
def costs() -> RoundCost:
    """Of every load: rows that are cheap, dear, or cheap up to a cliff."""
    rng, rows_J = np.random.default_rng(0), np.array(row_buckets(SIZE, BLOCK), np.int32)
    per_row = np.exp(rng.uniform(np.log(0.01), np.log(0.5), (LOADS, 1)))
    rises = per_row * np.diff(rows_J) * rng.choice([0.0, 0.5, 2.0], (LOADS, len(rows_J) - 1))
    seconds = np.cumsum(np.insert(rises, 0, 1, axis=1), axis=1).astype(np.float32)
    return RoundCost(np.tile(rows_J, (LOADS, 1)), seconds, np.full(LOADS, 0.1, np.float32))


@pytest.fixture(scope="module")
def fits(speaker, pieces, costs):
    """fits(drafter, planner) -> the least p-value of a load's requests, and how often each length was verified."""
    laws = [answer_law(speaker, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]

    def fits(name: str, planner: str):
        engine = filled(engine_of(speaker, pieces[name], "rejection"), PROMPTS, PARAMS)
        out = answers(engine, every_load(engine.slots), costs, planner)
        return min(fit(out.token_LxSxT[:, i], joint) for i, joint in enumerate(laws)), out.shares()

    return fits


@pytest.mark.parametrize("strategy", BY_CONFIDENCE)
@pytest.mark.parametrize("name", ["lookup", "block without confidences"])
def test_the_law_of_mixed_loads_scheduled_by_running_acceptance(fits, name, strategy):
    least, shares = fits(name, strategy)
    assert least > PASS
    assert np.sum(shares > 0.05) >= 2, "the lengths hardly vary"


def test_a_schedule_may_look_at_tokens_that_are_looked_up_and_at_no_others(fits):
    """What is copied is a function of the past, as the whole schedule then is."""
    assert fits("lookup", "load_aware, leaky")[0] > PASS
    assert fits("block without confidences", "load_aware, leaky")[0] < FAIL


# ------------------------------------------------------------------------------------------ running acceptance


def observe(rate_MxK: np.ndarray, rounds: int, verified: int) -> np.ndarray:
    """Running acceptance `[M, K]` at these true rates, a mean over slots and over the later rounds."""
    match_R, drafts, rng = np.repeat(np.arange(len(rate_MxK)), 64), rate_MxK.shape[1], np.random.default_rng(0)
    one, slots = SlotSchedule.of(np.ones(drafts), len(rate_MxK)), len(match_R)
    schedule = jax.tree.map(lambda a: jnp.stack([a] * slots), one)
    proposal = Proposal(jnp.zeros((slots, drafts), jnp.int32), jnp.zeros(()), (), jnp.zeros(()), jnp.asarray(match_R))
    step, seen = jax.jit(SlotSchedule.observed), []
    for _ in range(rounds):
        hits = np.cumprod(rng.random((slots, drafts)) < rate_MxK[match_R], axis=1).sum(axis=1)
        schedule = step(schedule, proposal, np.full(slots, verified), np.minimum(hits, verified))
        seen.append(schedule.acceptance(proposal))
    return np.mean(seen[rounds // 2 :], axis=0).reshape(len(rate_MxK), -1, drafts).mean(axis=1)


def test_running_acceptance_finds_the_true_rates_of_each_position_and_match():
    rate = np.array([[0.9, 0.5, 0.8], [0.3, 0.7, 0.7], [0.7, 0.9, 0.95]])
    assert np.abs(observe(rate, 160, verified=3) - rate).max() < 0.04


def test_what_is_not_verified_returns_to_what_is_assumed_beforehand():
    rate = np.zeros((1, 3))
    assert observe(rate, 160, verified=1)[0] == pytest.approx([0.7 / 21, 0.7, 0.7], rel=0.05)


# ---------------------------------------------------------------------------------------------------- by name


@pytest.fixture
def named(tiny_target):
    target = tiny_target("float32", **SHAPE)
    return lambda name: dataclasses.replace(target, name=name)


def test_auto_asks_for_the_released_drafter_of_a_known_target(named, monkeypatch, capsys):
    asked = []

    def offline(name, **options):
        asked.append(name)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert load_drafter("auto", named("Qwen/Qwen3-8B")).name == "lookup"
    assert asked == ["deepseek-ai/dspark_qwen3_8b_block7"]
    said = capsys.readouterr().err
    assert said.startswith("drafter: lookup (") and "no connection" in said and said.count("\n") == 1


def test_auto_takes_the_drafter_that_the_hub_gives(golden, monkeypatch, capsys):
    from dspark_jax.interop.target_io import load_target

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: golden / "dspark_vanilla")
    target = dataclasses.replace(load_target(golden / "target"), name="Qwen3-4B")
    drafter = load_drafter("auto", target)
    assert drafter.config.num_drafts == 5 and drafter.name == "deepseek-ai/dspark_qwen3_4b_block7"
    assert capsys.readouterr().err == "drafter: deepseek-ai/dspark_qwen3_4b_block7 (released for Qwen3-4B)\n"


def test_auto_looks_up_for_an_unknown_target_and_says_so(named, capsys):
    engine = Engine(named("somebody/else"), "auto", max_slots=1)
    assert engine.models.drafter == Lookup()
    assert capsys.readouterr().err == "drafter: lookup (no released drafter of somebody/else is known)\n"


def test_a_target_is_known_by_its_hub_id_or_by_a_directory_of_that_name(tmp_path):
    (tmp_path / "gemma-4-12B-it").mkdir()
    assert released_for(str(tmp_path / "gemma-4-12B-it")) == "deepseek-ai/dspark_gemma4_12b_block7"
    assert released_for("Qwen3-14B") == released_for("Qwen/Qwen3-14B") == "deepseek-ai/dspark_qwen3_14b_block7"
    assert released_for("somebody/Qwen3-14B") is None and released_for("Qwen/Qwen3-14B-Base") is None


def test_lookups_are_told_apart_by_their_settings(named):
    sizes = {drafter_fingerprint(load_drafter("lookup", named("tiny"), block_size=n)) for n in (3, 4)}
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda target: load_drafter("lookup", target, block_size=0), "0 drafts"),
        (lambda target: Engine(target, Drafter(Lookup(longest=0))), "n-grams of up to 0"),
        (lambda target: Engine(target, "lookup", strategy="dcut"), "'dcut' reads draft probabilities"),
        (lambda target: Engine(target, "lookup", strategy="fixed:8"), "more tokens than"),
        (lambda target: Engine(target, "no/such/place"), "no model at 'no/such/place'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(named, call, words):
    with pytest.raises(UserError, match=words) as error:
        call(named("tiny"))
    assert "\n" not in str(error.value)

"""Scheduled verification keeps the law of the tokens: every strategy, sampler and head, in mixed loads (method.md)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import Policy
from dspark_jax.interop.drafter_io import Drafter, borrow
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, Rope
from dspark_jax.scheduling import parking
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time
from dspark_jax.scheduling.scheduler import RoundCost, Strategy, row_buckets
from tests.decoding.laws import FAIL, PASS, chi_square
from tests.decoding.loads import (
    ANSWER,
    BLOCK,
    LOADS,
    PAGE,
    SIZE,
    STRATEGIES,
    SURE,
    VOCAB,
    Answers,
    answer_law,
    answers,
    engine_of,
    every_load,
    filled,
    fit,
)

HIDDEN = 8
PROMPTS = [[3], [2], [0]]
PARAMS = [SamplingParams(temperature=t, top_k=k, max_tokens=ANSWER) for t, k in ((1.0, 0), (0.0, 0), (0.8, 4))]
ADVERSARY = (SURE, -SURE, SURE, SURE, -SURE)  # confidence logits after each token


# ---------------------------------------------------------------------------------------------------- models, costs


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """Its law depends on all tokens so far."""
    sizes = {"num_heads": 2, "attention": (Attention(1, 4, Rope(10000.0)),), "max_length": PAGE}
    return tiny_target("float32", VOCAB, HIDDEN, layers=1, sharpness=1.5, context=1.0, **sizes)


@pytest.fixture(scope="module")
def drafters(target, tiny_drafter) -> dict[str, Drafter]:
    """By head. They are right often, not always; their confidences mean nothing."""
    markov = tiny_drafter(target, "bigram", BLOCK, noise=0.8, layer_kinds=(0,))
    proj = markov.params["confidence_head"]["proj"]
    proj["kernel"], proj["bias"] = 3 * proj["kernel"], proj["bias"] + 0.5
    rng, width = np.random.default_rng(2), 3 * VOCAB
    cell = {"kernel": rng.standard_normal((2 * VOCAB + HIDDEN, width)), "bias": rng.standard_normal(width)}
    head = markov.params["markov_head"] | {"joint_proj": {k: jnp.asarray(a, jnp.float32) for k, a in cell.items()}}
    config = dataclasses.replace(markov.config, head_type="rnn")
    return {"markov": markov, "rnn": Drafter(config, markov.params | {"markov_head": head}, markov.borrowed)}


def trusting(drafter: Drafter, logit_V: tuple[float, ...]) -> Drafter:
    """The drafter with a confidence that is a function of the previous token alone."""
    kernel = np.concatenate([np.zeros(HIDDEN), logit_V])[:, None]  # W1 is the identity
    proj = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(1)}
    return dataclasses.replace(drafter, params=drafter.params | {"confidence_head": {"proj": proj}})


def costs_of_all() -> RoundCost:
    """A random staircase for every load, between free and dear, some with cliffs."""
    rng = np.random.default_rng(0)
    rows_J = np.array(row_buckets(SIZE, BLOCK), np.int32)
    per_row = np.exp(rng.uniform(np.log(0.01), np.log(0.5), (LOADS, 1)))
    rises = per_row * np.diff(rows_J) * rng.choice([0.0, 0.5, 2.0], (LOADS, len(rows_J) - 1))
    seconds = np.cumsum(np.insert(rises, 0, 1, axis=1), axis=1).astype(np.float32)
    return RoundCost(np.tile(rows_J, (LOADS, 1)), seconds, rng.uniform(0, 0.5, LOADS).astype(np.float32))


# ---------------------------------------------------------------------------------------------------- mixed loads


@pytest.fixture(scope="module")
def laws(target) -> list[np.ndarray]:
    return [answer_law(target, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def run(target, drafters, laws):
    """run(head, adversary, ...) -> p-value of each of a load's requests, and how often each length was verified."""

    def run(head: str, adversary: bool, sampler: str, planner: str, seed: int = 0):
        drafter = trusting(drafters[head], ADVERSARY) if adversary else drafters[head]
        engine = filled(engine_of(target, drafter, sampler), PROMPTS, PARAMS)
        out = answers(engine, every_load(engine.slots, seed=seed), costs_of_all(), planner)
        return [fit(out.token_LxSxT[:, i], joint) for i, joint in enumerate(laws)], out.shares()

    return run


def check_law(run, head: str, adversary: bool, sampler: str, strategy: str, seed: int = 0) -> None:
    fits, shares = run(head, adversary, sampler, strategy, seed)
    assert min(fits) > PASS
    assert np.sum(shares > 0.02) >= 4, "the lengths hardly vary"


WITH_CONFIDENCE = STRATEGIES[:3]
CASES = [
    *[(head, False, "rejection", strategy) for head in ("markov", "rnn") for strategy in STRATEGIES],
    *[("markov", True, "rejection", strategy) for strategy in WITH_CONFIDENCE],
    *[("markov", True, "coupled", strategy) for strategy in STRATEGIES],
]


@pytest.mark.parametrize(("head", "adversary", "sampler", "strategy"), CASES)
def test_the_law_of_mixed_loads(run, head, adversary, sampler, strategy):
    """Greedy and sampled requests share the budgets; the adversary is a legal one, 0 or 1 by the previous token."""
    check_law(run, head, adversary, sampler, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
@pytest.mark.parametrize("adversary", [False, True])
@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_the_law_of_more_mixed_loads(run, head, adversary, sampler, strategy, seed):
    check_law(run, head, adversary, sampler, strategy, seed)


MISTAKES = [*[f"{strategy}, leaky" for strategy in WITH_CONFIDENCE], "dcut by the drawn token"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_schedule_that_looks_at_the_token_it_decides_is_seen_under_rejection(run, mistake):
    fits, _ = run("markov", False, "rejection", mistake)
    assert min(fits) < FAIL


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_same_schedule_is_exact_under_coupled(run, mistake):
    fits, _ = run("markov", False, "coupled", mistake)
    assert min(fits) > PASS


@pytest.mark.slow
def test_the_loads_are_what_the_engine_runs(target, drafters):
    """Some of them by themselves, through the engine's own program with its buckets: the same tokens and lengths."""
    policy, costs = Policy("rejection", Strategy("load_aware")), costs_of_all()
    engine = filled(engine_of(target, drafters["markov"], "rejection"), PROMPTS, PARAMS)
    slots = every_load(engine.slots)
    out, caches = answers(engine, slots, costs, "load_aware"), engine.caches
    for load in range(0, LOADS, LOADS // 24):
        mine = jax.tree.map(lambda a, i=load: a[i * SIZE : (i + 1) * SIZE], slots)
        mine = mine.replace(table_RxC=jnp.arange(SIZE)[:, None])
        cost = RoundCost(*(jnp.asarray(a[load]) for a in costs))
        sizes = {"active": SIZE, "drafts": BLOCK, "context_pages": 1, "rounds": ANSWER}
        caches, _, emitted = decode(engine.models, policy, engine.weights, caches, mine, cost, **sizes)
        alone = Answers.of(emitted)
        assert (alone.token_LxSxT[0] == out.token_LxSxT[load]).all()
        assert (alone.verified_DxLxS[:, 0] == out.verified_DxLxS[:, load]).all()


# ------------------------------------------------------------------------------------------------- cases known by hand

A, B, START = 0, 1, 2


def chain_target(target: Target, p_A: float) -> Target:
    """Says A with probability `p_A`, else B, whatever came before."""
    silent = {"layers": jax.tree.map(jnp.zeros_like, target.params["layers"])}
    embedding, head = np.eye(VOCAB, HIDDEN), np.zeros((HIDDEN, VOCAB))
    head[:VOCAB] = np.log([p_A, 1 - p_A, *[1e-30] * (VOCAB - 2)]) / np.sqrt(HIDDEN)  # what the norm makes of a one
    tables = {"embedding": embedding, "lm_head": {"kernel": head}, "norm": {"scale": np.ones(HIDDEN)}}
    return dataclasses.replace(target, params=silent | jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tables))


def chain_drafter(drafter: Drafter, target: Target, q_A: float, trust: dict[int, float]) -> Drafter:
    """Drafts A with probability `q_A`, else B; its confidences after each token are those of `trust`."""
    logits = np.log([q_A, 1 - q_A, *[1e-30] * (VOCAB - 2)])
    head = {"markov_w1": np.eye(VOCAB), "markov_w2": np.tile(logits[:, None], (1, VOCAB))}
    head = {name: jnp.asarray(a, jnp.float32) for name, a in head.items()}
    backbone = drafter.params["backbone"] | {"norm": {"scale": jnp.zeros(HIDDEN)}}  # no opinion of its own
    params = drafter.params | {"backbone": backbone, "markov_head": head}
    odds = np.array([trust.get(token, 0.0) for token in range(VOCAB)])
    with np.errstate(divide="ignore"):
        logit_V = np.clip(np.log(odds) - np.log1p(-odds), -SURE, SURE)
    return trusting(Drafter(drafter.config, params, borrow(target)), tuple(logit_V))


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests that all begin with START, whose target says A or B with (.7, .3). One token of one of them is watched.

    `rows`, `seconds`: the staircase. `alone`: the first request has it for itself.
    """

    q_A: float
    trust: dict[int, float]  # confidence after a token
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    alone: bool = True
    request: int = 0
    token: int = 0


P_A, DEAR = 0.7, 1e3
ONE_SLOT = (1, 2, 3, 4, 5, 15)
BY_HAND = {
    "appendix A": Case(0.5, {START: 0.8, A: 0.9}, ONE_SLOT, (1, 1 / 0.5, 1 / 0.45, DEAR, DEAR, DEAR)),
    # One draft pays if its confidence is above one half; a second never does.
    "D-Cut": Case(0.6, {}, ONE_SLOT, (1, 1.5, DEAR, DEAR, DEAR, DEAR)),
    # Four drafts pay if all of them are sure, fewer never do. An unknown request's are not, so that two rounds verify
    # nothing; the third asks the first, whose last confidence has seen a draft of the very position drafted now.
    "two rounds ago": Case(0.8, {START: 1.0, A: 1.0, B: 0.6}, ONE_SLOT, (1, 2.5, 3.4, 4.2, 4.7, DEAR), token=2),
    # Room for two drafts. Where the first request's first draft is A, it is sure of its second as well and takes both.
    "one seed": Case(
        0.5, {START: 1.0, A: 1.0}, row_buckets(SIZE, BLOCK), (1, 1, DEAR, DEAR, DEAR, DEAR), alone=False, request=1
    ),
}


@pytest.mark.parametrize(
    ("name", "sampler", "planner", "mistake", "share_of_A"),
    [
        ("appendix A", "rejection", "load_aware", "", P_A),
        ("appendix A", "rejection", "global search over current confidences", "", 0.85),
        ("appendix A", "coupled", "load_aware", "", P_A),  # which is that global search there
        ("D-Cut", "rejection", "dcut", "", P_A),
        ("D-Cut", "rejection", "dcut by the drawn token", "", 0.88),
        ("D-Cut", "coupled", "dcut", "", P_A),
        ("two rounds ago", "rejection", "load_aware_async", "", P_A),
        # AAA is sure of itself: it has its block verified, and the same noise drafts A again.
        ("two rounds ago", "rejection", "load_aware_async", "noise by position", 0.8**2 * P_A + (1 - 0.8**3) * P_A),
        ("two rounds ago", "coupled", "load_aware_async", "", P_A),
        ("one seed", "rejection", "load_aware", "", P_A),
        # A is never verified; B always is, and comes out with .3 / .5.
        ("one seed", "rejection", "load_aware", "one seed", 0.5 * P_A + 0.5 * (1 - 0.3 / 0.5)),
        ("one seed", "coupled", "load_aware", "one seed", P_A),
    ],
)
def test_cases_that_are_known_by_hand(target, drafters, name, sampler, planner, mistake, share_of_A):
    """The engine gives the exact law, and where a mistake is made, exactly the wrong one that theory says."""
    case, speaker = BY_HAND[name], chain_target(target, P_A)
    drafter = chain_drafter(drafters["markov"], speaker, case.q_A, case.trust)
    requests = [[START]] * SIZE, [SamplingParams(max_tokens=ANSWER)] * SIZE
    engine = filled(engine_of(speaker, drafter, sampler), *requests)
    slots = every_load(engine.slots, alone=case.alone, one_seed=mistake == "one seed")
    curve = (np.tile(a, (LOADS, 1)) for a in (np.int32(case.rows), np.float32(case.seconds)))
    costs = RoundCost(*curve, np.zeros(LOADS, np.float32))
    out = answers(engine, slots, costs, planner, by_position=mistake == "noise by position")
    tokens = out.token_LxSxT[:, case.request, case.token]
    assert chi_square(tokens, law_of(share_of_A)) > PASS
    if share_of_A != P_A:
        assert chi_square(tokens, law_of(P_A)) < FAIL


def law_of(share_of_A: float) -> np.ndarray:
    return np.array([share_of_A, 1 - share_of_A, *[0] * (VOCAB - 2)])


# ---------------------------------------------------------------------------------------------------- through the queue


def table_of(seconds: tuple[float, ...], draft: float) -> CostTable:
    """Costs of an engine's rounds, whatever the number of its slots in use."""
    sizes, rows = [(n, PAGE) for n in range(1, SIZE + 1)], row_buckets(SIZE, BLOCK)
    target = {(row, *size): Time(s) for size in sizes for row, s in zip(rows, seconds, strict=True)}
    stamp = Stamp("cpu", 1, "", "tiny", "", "", "float32", "")
    return CostTable(stamp, target, {size: Time(draft) for size in sizes})


SHARED = [(sampler, strategy) for sampler in ("rejection", "coupled") for strategy in STRATEGIES]


@pytest.mark.parametrize(("sampler", "strategy"), SHARED)
def test_requests_of_one_seed_draw_different_noise_where_they_decide_about_each_other(
    target, drafters, sampler, strategy
):
    engine = engine_of(target, drafters["markov"], sampler, strategy, table_of(BY_HAND["one seed"].seconds, 1e-6))
    filled(engine, [[START]] * SIZE, [SamplingParams(seed=5, max_tokens=ANSWER)] * SIZE)
    seeds = set(zip(*(np.asarray(word).tolist() for word in engine.slots.sampling.seed), strict=True))
    own = sampler == "rejection" and strategy != "threshold:0.5"
    assert len(seeds) == (SIZE if own else 1)


@pytest.mark.slow
def test_one_seed_for_all_requests_of_a_load(target, drafters):
    """The case known by hand, load after load through the engine, keeps the law."""
    case, speaker = BY_HAND["one seed"], chain_target(target, P_A)
    drafter = chain_drafter(drafters["markov"], speaker, case.q_A, case.trust)
    engine = engine_of(speaker, drafter, "rejection", "load_aware", table_of(case.seconds, 1e-6))
    engine.load.parks = False
    params = [SamplingParams(max_tokens=1, seed=i // SIZE) for i in range(SIZE * 1500)]
    outs = engine.generate([[START]] * len(params), params)
    for i in range(SIZE):
        assert chi_square(np.array([out.token_ids[0] for out in outs[i::SIZE]]), law_of(P_A)) > PASS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["load_aware", "load_aware_async"])
def test_the_law_of_refilled_slots_where_drafting_is_parked_now_and_then(target, drafters, laws, monkeypatch, strategy):
    monkeypatch.setattr(engine_module, "bucket", lambda count: SIZE)  # one program for every number of slots
    monkeypatch.setattr(parking, "PROBE_EVERY", 1)
    seconds = tuple(1 + 0.1 * (row - SIZE) for row in row_buckets(SIZE, BLOCK))
    engine = engine_of(target, drafters["markov"], "rejection", strategy, table_of(seconds, 0.3))
    engine.rounds = 1
    outs = engine.generate(PROMPTS * 1500, [dataclasses.replace(p, seed=7) for p in PARAMS] * 1500)
    for i, joint in enumerate(laws):
        assert fit(np.array([out.token_ids for out in outs[i::SIZE]]), joint) > PASS
    drafted = np.concatenate([out.drafted for out in outs])
    assert 0.1 < np.mean(drafted > 0) < 0.9

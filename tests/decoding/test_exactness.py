"""Speculation changes nothing: token for token where the sampler promises it, in law everywhere (DESIGN rule 4)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding import verify as verify_module
from dspark_jax.decoding.draft import Proposal, draft_key
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams, SlotSampling, draw, log_prob_of
from dspark_jax.decoding.verify import verify
from dspark_jax.evaluation.equality import first_difference
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import dense_forward, load_target
from pallas_kernels import warp as warps
from pallas_kernels.draft_law import Written
from pallas_kernels.noise import Role, position_key
from pallas_kernels.ragged_attention import ragged_rows
from pallas_kernels.warp import Warp
from tests.decoding.laws import FAIL, PASS, chi_square, law

# ------------------------------------------------------------------------------------ (a) float64: token for token

VOCAB, BLOCK, CHUNK = 41, 3, 8
SPOKEN = range(0, VOCAB, 3)  # of the reduced drafters
LENGTHS = (1, 15, 16, 17, 2, 31, 32, 33)  # around pages of 16 and chunks of 8
WARPS = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.02}, {"temperature": 0.0, "top_k": 3},
]  # fmt: skip


def requests():
    """16 requests: every length with two warps, each warp with two lengths; some have a stop token."""
    rng = np.random.default_rng(5)
    lengths = [*LENGTHS, *LENGTHS[3:], *LENGTHS[:3]]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    params = [
        SamplingParams(
            **WARPS[i % 8],
            seed=i * 7919 + (i << 40),
            max_tokens=(18, 7, 1, 18)[i % 4],
            stop_token_ids=(7,) * (i % 3 == 0),
        )
        for i in range(16)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def models(tiny_target, tiny_drafter):
    with jax.enable_x64(True):
        target = tiny_target(vocab=VOCAB)
        drafters = {
            (kind, spoken): tiny_drafter(target, kind, BLOCK, SPOKEN if spoken == "reduced" else None)
            for kind in ("bigram", "random") for spoken in ("full", "reduced")
        }  # fmt: skip
        return target, drafters


@pytest.fixture(scope="module")
def plain(models):
    """What each request says without speculation, all run at once with the usual long prefill chunks."""
    with jax.enable_x64(True):
        engine = Engine(models[0], strategy="off", sampler="coupled", max_slots=8, rounds_per_dispatch=32)
        return [c.token_ids for c in engine.generate(*requests())]


@pytest.fixture(scope="module")
def run(models, plain):
    """run(drafter, ...) -> the engine's completions of the requests, checked against plain decoding where exact."""

    def run(kind, spoken, strategy, sampler="coupled", order=range(16), chunk=CHUNK, **options):
        prompts, params = requests()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "PREFILL_CHUNK", chunk)
            engine = Engine(models[0], models[1][kind, spoken], strategy=strategy, sampler=sampler, **options)
            outs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        for i, out in zip(order, outs, strict=True):
            if sampler == "coupled" or params[i].temperature == 0:
                assert out.token_ids == plain[i], (i, params[i])
        return outs

    return run


def accepted_and_rejected(outs) -> tuple[int, int]:
    accepted = sum(sum(c.accepted) for c in outs)
    return accepted, sum(sum(c.verified) for c in outs) - accepted


@pytest.mark.usefixtures("x64")
class TestTokenForToken:
    @pytest.mark.slow
    def test_plain_decoding_alone_equals_plain_decoding_in_company(self, models, plain):
        prompts, params = requests()
        engine = Engine(models[0], strategy="off", sampler="rejection", max_slots=1)
        for i in (1, 4, 6):
            assert engine.generate([prompts[i]], params[i])[0].token_ids == plain[i]

    @pytest.mark.parametrize("strategy", ["fixed:1", "fixed:2", "auto"])
    @pytest.mark.parametrize("kind", ["bigram", "random"])
    def test_every_length_of_draft(self, run, kind, strategy):
        # All of a wave ends within one dispatch of 32 rounds: one program each.
        outs = run(kind, "full", strategy, max_slots=8, rounds_per_dispatch=32)
        accepted, rejected = accepted_and_rejected(outs)
        assert accepted > (40 if kind == "bigram" else 0) and rejected > 20

    @pytest.mark.parametrize("order", [range(16), [(5 * i + 3) % 16 for i in range(16)]], ids=["order", "permuted"])
    def test_refilled_slots_and_one_round_a_dispatch(self, run, order):
        outs = run("bigram", "full", "auto", order=order, max_slots=3, rounds_per_dispatch=1, page_size=5)
        assert min(accepted_and_rejected(outs)) > 20

    @pytest.mark.slow
    def test_one_slot_and_four_rounds_a_dispatch(self, run):
        run("bigram", "full", "auto", max_slots=1, rounds_per_dispatch=4, chunk=16)

    @pytest.mark.parametrize("kind", ["bigram", "random"])
    def test_reduced_vocabulary(self, run, kind):
        accepted, rejected = accepted_and_rejected(run(kind, "reduced", "auto", max_slots=8, rounds_per_dispatch=32))
        assert accepted > 0 and rejected > 20

    def test_greedy_requests_of_the_rejection_sampler_among_sampled_ones(self, run):
        outs = run("bigram", "full", "auto", sampler="rejection", max_slots=8, rounds_per_dispatch=32)
        assert min(accepted_and_rejected(outs)) > 0

    def test_golden_pair(self, golden):
        """A drafter trained for its target, in float64: many drafts accepted, every token equal."""
        target = load_target(golden / "target", dtype="float64")
        drafter = load_drafter(golden / "dspark_vanilla", target)
        prompts = [
            list(text.encode())
            for text in ("def scan(a):\n    ", "import os\n", "# the context is", "    return self.")
        ]
        params = [SamplingParams(temperature=t, seed=i, max_tokens=40) for i, t in enumerate((0.0, 0.3, 0.7, 1.0))]
        options = {"sampler": "coupled", "max_slots": 4, "rounds_per_dispatch": 40, "max_length": 64}
        off = Engine(target, strategy="off", **options).generate(prompts, params)
        outs = Engine(target, drafter, **options).generate(prompts, params)
        assert [c.token_ids for c in outs] == [c.token_ids for c in off]
        accepted, rejected = accepted_and_rejected(outs)
        assert accepted > 20 and rejected > 20


# ------------------------------------------------------------------------------- (b) float32: differ only at a tie


def test_float32_runs_part_at_near_ties_only(golden):
    target = load_target(golden / "target", dtype="float32")
    drafter = load_drafter(golden / "dspark_vanilla", target)
    texts = (
        "def scan(a):\n    ",
        "import os\n",
        "# the context is",
        "    return self.",
        "class A:\n",
        "for i in ",
        "x = [",
        "\n\n",
    )
    prompts = [list(text.encode()) for text in texts]
    params = [SamplingParams(temperature=(0.0, 0.7)[i % 2], seed=i, max_tokens=48) for i in range(len(texts))]
    options = {"sampler": "coupled", "max_slots": 8, "rounds_per_dispatch": 48, "max_length": 128}
    off = Engine(target, strategy="off", **options).generate(prompts, params)
    outs = Engine(target, drafter, **options).generate(prompts, params)
    for prompt, p, a, b in zip(prompts, params, off, outs, strict=True):
        difference = first_difference(target, prompt, a.token_ids, b.token_ids, p, p.seed)
        assert difference is None or difference.near_tie, str(difference)


# ------------------------------------------------------------------------- (c) the law of draft, accept, residual

DRAFTS, TRIALS = 2, 20_000


@dataclasses.dataclass(frozen=True)
class Chain:
    """A target and a drafter that look at the previous token only: logits `[V, V]` and `[V, Vd]`."""

    p: np.ndarray
    q: np.ndarray
    ids: np.ndarray


def chain(p_logits, q_logits, ids=None) -> Chain:
    q_logits = np.asarray(q_logits, np.float32)
    return Chain(
        np.asarray(p_logits, np.float32), q_logits, np.arange(q_logits.shape[1]) if ids is None else np.asarray(ids)
    )


def random_chain(ids=None, agreement=0.5) -> Chain:
    rng = np.random.default_rng(3)
    p = 1.5 * rng.standard_normal((5, 5))
    q = agreement * p + rng.standard_normal((5, 5))
    return chain(p, q if ids is None else q[:, ids], ids)


def rows_of(p, size=5):
    """Logits `[5, 5]` of one distribution after every token; impossible tokens pad it to five."""
    full = np.full(size, -1e4)
    full[: len(p)] = np.log(np.asarray(p))
    return np.tile(full, (size, 1))


CHAINS = {
    "random": random_chain(),
    "reduced vocabulary": random_chain(ids=[0, 2, 3]),
    "equal": chain(random_chain().p, random_chain().p),
    "published case D1": chain(rows_of([0.1, 0.6, 0.3]), rows_of([0.8, 0.1, 0.1])),
    "disjoint": chain(rows_of([0.5, 0.5]), rows_of([0.2, 0.3, 0.5])[:, [3, 4, 0, 1, 2]]),
}
PARAMS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7, top-k": SamplingParams(temperature=0.7, top_k=3),
    "T=1.3, top-k, top-p, min-p": SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.05),
    "greedy": SamplingParams(temperature=0.0),
}


def round_program(sampler: str):
    """One round of many slots: proposals drawn as `propose` draws them, then the real `verify`."""

    def one_round(anchor, position, count, warp, seed, p, q, ids):
        sampling = SlotSampling(warp, seed, jnp.full((len(anchor), 1), -1))
        previous, steps = anchor, []
        for k in range(DRAFTS):
            warped = warps.apply(q[previous], warp)
            index = draw(warped, warp, draft_key(sampler, seed, position, k), ids)
            previous = ids[index]
            steps.append((previous, log_prob_of(warped, index), warped, jnp.zeros(len(anchor))))
        token, log_q, warped, confidence = (jnp.stack(parts, axis=1) for parts in zip(*steps, strict=True))
        proposal = Proposal(token, log_q, Written(warped), confidence)
        rows = ragged_rows(count, position, len(anchor) * (DRAFTS + 1), DRAFTS + 1)
        block = jnp.concatenate([anchor[:, None], proposal.token_RxK], axis=1)
        verdict = verify(p[block[rows.slot_N, rows.offset_N]], rows, proposal, ids, sampling, sampler)
        return proposal.token_RxK, verdict.accepted_R, verdict.next_R

    return jax.jit(one_round)


shared_program = functools.cache(round_program)


def simulate(program, chain: Chain, params, tokens: int, counts=None, start: int = 0):
    """`[R, tokens]` emitted by R slots with different seeds, and the drafts accepted in their first round."""
    each = [params] * TRIALS if isinstance(params, SamplingParams) else params
    names = ("temperature", "top_k", "top_p", "min_p")
    warp = Warp(*(jnp.asarray([getattr(p, name) for p in each]) for name in names))
    seed = (jnp.arange(TRIALS, dtype=jnp.uint32), jnp.full(TRIALS, 11, jnp.uint32))
    counts = np.full(TRIALS, DRAFTS + 1) if counts is None else counts
    out, length, first = np.zeros((TRIALS, tokens + DRAFTS + 1), int), np.zeros(TRIALS, int), None
    anchor, position = np.full(TRIALS, start), np.full(TRIALS, 6)
    while (length < tokens).any():
        arrays = (jnp.asarray(a, jnp.int32) for a in (anchor, position, counts))
        drafted, accepted, following = map(
            np.asarray, program(*arrays, warp, seed, chain.p, chain.q, jnp.asarray(chain.ids))
        )
        first = accepted if first is None else first
        running = length < tokens
        for k in range(DRAFTS + 1):
            emits = running & (k <= accepted)
            token = np.where(k == accepted, following, drafted[:, min(k, DRAFTS - 1)])
            out[np.arange(TRIALS)[emits], (length + k)[emits]] = token[emits]
        step = np.where(running, accepted + 1, 0)
        length, position, anchor = length + step, position + step, np.where(running, following, anchor)
    return out[:, :tokens], first


def sequence_law(p: np.ndarray, tokens: int, start: int = 0) -> np.ndarray:
    """`[V] * tokens`: the probability of every sequence of a chain."""
    joint = p[start]
    for _ in range(tokens - 1):
        joint = joint[..., None] * p
    return joint


def both_accept(sampler: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`[V, V]` the probability, after each token, that token i is drafted and accepted."""
    if sampler == "rejection":
        return np.minimum(p, q)
    # Gumbel coupling: i wins both races with probability 1 / sum_j max(p_j / p_i, q_j / q_i).
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
        return np.where((p > 0) & (q > 0), 1 / ratio.sum(-1), 0)


def full_q(chain: Chain, params) -> np.ndarray:
    """The draft law over the target's vocabulary."""
    q = np.zeros_like(chain.p, np.float64)
    q[:, chain.ids] = law(chain.q, params)
    return q


@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
class TestLaw:
    @pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
    @pytest.mark.parametrize("name", CHAINS)
    def test_tokens_and_acceptance(self, sampler, name, params):
        """Three tokens, over as many rounds as they take: rejected positions are drafted again."""
        c = CHAINS[name]
        tokens, accepted = simulate(shared_program(sampler), c, params, 3)
        p, q = law(c.p, params), full_q(c, params)
        assert chi_square(tokens, sequence_law(p, 3)) > PASS
        assert chi_square(tokens[:, 0], p[0]) > PASS
        joint = both_accept(sampler, p, q)
        if params.temperature == 0:
            joint = np.minimum(p, q)
        one, two = joint[0].sum(), (joint[0] * joint.sum(-1)).sum()
        assert chi_square(accepted, np.array([1 - one, one - two, two]).clip(0)) > PASS

    def test_second_token_given_the_first(self, sampler):
        c = CHAINS["random"]
        tokens, accepted = simulate(shared_program(sampler), c, PARAMS["T=1"], 2)
        p = law(c.p, PARAMS["T=1"])
        for first in range(5):
            # Also among the rounds that accepted it: the second draft's fate is no news about the first.
            for chosen in (tokens[:, 0] == first, (tokens[:, 0] == first) & (accepted > 0)):
                assert chi_square(tokens[chosen, 1], p[first]) > PASS

    def test_equal_distributions_are_always_accepted(self, sampler):
        _, accepted = simulate(shared_program(sampler), CHAINS["equal"], PARAMS["T=0.7, top-k"], 1)
        assert (accepted == DRAFTS).mean() > 1 - 1e-4  # log p and log q may differ in the last bit

    def test_disjoint_supports_are_always_rejected(self, sampler):
        tokens, accepted = simulate(shared_program(sampler), CHAINS["disjoint"], PARAMS["T=1"], 3)
        assert (accepted == 0).all() and set(np.unique(tokens)) == {0, 1}

    def test_greedy_slots_among_sampled_ones(self, sampler):
        c, kinds = CHAINS["random"], list(PARAMS.values())
        tokens, _ = simulate(shared_program(sampler), c, [kinds[i % 4] for i in range(TRIALS)], 3)
        for i, params in enumerate(kinds):
            assert chi_square(tokens[i::4], sequence_law(law(c.p, params), 3)) > PASS

    def test_ragged_verification(self, sampler):
        """Slots that verify none, some and all of their drafts in one batch: the unverified ones count for nothing."""
        counts = 1 + np.arange(TRIALS) % (DRAFTS + 1)
        tokens, accepted = simulate(shared_program(sampler), CHAINS["random"], PARAMS["T=1"], 3, counts)
        assert (accepted < counts).all()
        for k in range(DRAFTS + 1):
            assert chi_square(tokens[k :: DRAFTS + 1], sequence_law(law(CHAINS["random"].p, PARAMS["T=1"]), 3)) > PASS


def test_coupled_acceptance_bound():
    """P(accept) >= (1 - TV) / (1 + TV), after every token (arXiv 2408.07978)."""
    c, params = CHAINS["random"], PARAMS["T=1"]
    distance = np.abs(law(c.p, params) - full_q(c, params)).sum(-1) / 2
    for start in range(5):
        _, accepted = simulate(shared_program("coupled"), c, params, 1, start=start)
        bound = (1 - distance[start]) / (1 + distance[start])
        assert (accepted > 0).mean() > bound - 4 * np.sqrt(bound * (1 - bound) / TRIALS)


class TestNegativeControls:
    """Known mistakes, made on purpose: the chi-square above would see them."""

    def biased(self) -> bool:
        c, params = CHAINS["published case D1"], PARAMS["T=1"]
        tokens, _ = simulate(round_program("rejection"), c, params, 3)  # traced anew, so that the patch is seen
        return chi_square(tokens, sequence_law(law(c.p, params), 3)) < FAIL

    def test_draft_noise_reused_for_the_residual(self, monkeypatch):
        """vllm#47386: after a rejection the token is drawn with the noise that drew the draft."""

        def reuse(seed, position, role, slot=0):
            reused = position_key(seed, position - 1, Role.DRAFT, 0)
            real = position_key(seed, position, role, slot)
            return tuple(jnp.where(role == Role.RESIDUAL, *words) for words in zip(reused, real, strict=True))

        monkeypatch.setattr(verify_module, "position_key", reuse)
        assert self.biased()

    def test_acceptance_that_ignores_q(self, monkeypatch):
        real = verify_module._accept_sampled

        def ignorant(warped, rows, block, proposal, sampling):
            return real(warped, rows, block, proposal.replace(log_q_RxK=jnp.zeros_like(proposal.log_q_RxK)), sampling)

        monkeypatch.setattr(verify_module, "_accept_sampled", ignorant)
        assert self.biased()

    def test_residual_that_ignores_q(self, monkeypatch):
        monkeypatch.setattr(verify_module, "_residual", lambda warped, draft, ids: warped)
        assert self.biased()

    def test_position_keyed_draft_noise_after_a_selected_round(self):
        """DESIGN rule 4: a budget made from a discarded draft of the same position needs fresh draft noise.

        Round 1 drafts two tokens and its second draft decides whether round 2 verifies its first one. With noise by
        absolute position both are one token wherever the drafter repeats itself, so the budget has looked at it.
        """
        c, params = CHAINS["published case D1"], PARAMS["T=1"]
        assert self.selected(shared_program("rejection"), c, params) > PASS

    def test_position_keyed_draft_noise_is_biased(self, monkeypatch):
        def by_position(sampler, seed, anchor, slot):
            return position_key(seed, anchor + 1 + slot, Role.DRAFT)

        monkeypatch.setitem(globals(), "draft_key", by_position)
        assert self.selected(round_program("rejection"), CHAINS["published case D1"], PARAMS["T=1"]) < FAIL

    def selected(self, program, c, params) -> float:
        """p-value of round 2's first token, among slots whose first draft was rejected in round 1."""
        warp = Warp(*(jnp.full(TRIALS, v) for v in (1.0, 0, 1.0, 0.0)))
        seed = (jnp.arange(TRIALS, dtype=jnp.uint32), jnp.full(TRIALS, 11, jnp.uint32))
        tables = (c.p, c.q, jnp.asarray(c.ids))
        zero, six = jnp.zeros(TRIALS, jnp.int32), jnp.full(TRIALS, 6, jnp.int32)
        drafted, accepted, anchor = program(zero, six, zero + DRAFTS + 1, warp, seed, *tables)
        count = jnp.where(drafted[:, 1] == 0, 2, 1).astype(jnp.int32)  # what the old round's second draft said
        drafted, fate, following = program(anchor, six + 1, count, warp, seed, *tables)
        token = np.where(np.asarray(fate) > 0, np.asarray(drafted[:, 0]), np.asarray(following))
        return chi_square(token[np.asarray(accepted) == 0], law(c.p, params)[0])


# ------------------------------------------------------------------------------ (c) end to end, through the engine


@pytest.fixture(scope="module")
def small(tiny_target, tiny_drafter):
    """Five tokens, float32; the exact law of three tokens after a prompt of two."""
    target = tiny_target("float32", vocab=5, hidden=16, layers=1, max_length=16, sharpness=1.5, context=1.0)
    drafter = tiny_drafter(target, "bigram", block=3, noise=0.8)
    prompt, joint = [3, 1], np.ones((5, 5, 5))
    for sequence in itertools.product(range(5), repeat=2):
        logits = np.asarray(dense_forward(target.module, target.params, jnp.asarray([[*prompt, *sequence]])).logits[0])
        a, b, c = law(logits[1:4], SamplingParams())
        joint[sequence] = a[sequence[0]] * b[sequence[1]] * c
    return target, drafter, prompt, joint


@pytest.mark.parametrize(
    ("sampler", "strategy"),
    [("rejection", "off"), ("rejection", "fixed:1"), ("rejection", "auto"), ("coupled", "auto")],
)
def test_law_of_whole_answers(small, sampler, strategy):
    target, drafter, prompt, joint = small
    engine = Engine(
        target, drafter, strategy=strategy, sampler=sampler, max_slots=512, rounds_per_dispatch=3, cache_tokens=512 * 16
    )
    params = [SamplingParams(max_tokens=3, seed=i) for i in range(4096)]
    outs = engine.generate([prompt] * len(params), params)
    tokens = np.array([c.token_ids for c in outs])
    assert chi_square(tokens, joint) > PASS
    assert chi_square(tokens[:, :2], joint.sum(-1)) > PASS
    assert chi_square(tokens[:, 0], joint.sum((1, 2))) > PASS
    if strategy != "off":
        assert min(accepted_and_rejected(outs)) > 500

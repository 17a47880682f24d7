"""Eagle3 in the engine: tokens are the target's, drafts depend on their request alone, the cache is a dense pass's."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import Drafter, borrow, load_drafter
from dspark_jax.interop.drafter_tensors import abstract_drafter
from dspark_jax.interop.target_io import dense_forward, hidden_states, load_target
from dspark_jax.models.config import Eagle3Config, draft_decoder
from dspark_jax.models.eagle3 import Eagle3

# ------------------------------------------------------------------------- float64, a drafter that is often right

TEXT = b"def scan(self, other):\n    if other is None:\n        return self.context\n    return other\n"
LENGTHS = (1, 2, 16, 17, 33, 40, 9, 25)  # around pages, prefill chunks and both
CHUNK, MAX_LENGTH = 8, 64


def requests():
    """Greedy and sampled requests, some with a stop token, of many prompt and answer lengths."""
    prompts = [list(TEXT[3 * i : 3 * i + n]) for i, n in enumerate(LENGTHS)]
    params = [
        SamplingParams(temperature=(0.0, 0.7, 0.0, 0.3)[i % 4], seed=i, max_tokens=(4, 24, 9, 20, 1, 23, 7, 18)[i],
                       ignore_eos=True, stop_token_ids=(ord("\n"),) * (i % 4 == 2))
        for i in range(len(LENGTHS))
    ]  # fmt: skip
    return prompts, params


@pytest.fixture(scope="module")
def pair(golden):
    with jax.enable_x64(True):
        target = load_target(golden / "target", dtype="float64")
        drafter = load_drafter(golden / "eagle3", target)
        return target, dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, num_drafts=3))


@pytest.fixture(scope="module")
def plain(pair):
    """The requests without speculation."""
    with jax.enable_x64(True):
        engine = Engine(pair[0], strategy="off", max_slots=8, max_length=MAX_LENGTH, rounds_per_dispatch=32)
        return [c.token_ids for c in engine.generate(*requests())]


@pytest.fixture(scope="module")
def together(pair):
    """The requests with Eagle3 in one wave, each prompt in one chunk."""
    with jax.enable_x64(True):
        engine = Engine(*pair, sampler="coupled", max_slots=8, max_length=MAX_LENGTH, rounds_per_dispatch=32)
        return engine.generate(*requests())


@pytest.fixture(scope="module")
def refilled(pair):
    """The engine, the requests and their pages, after two slots that were refilled served them, prompts in chunks."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PREFILL_CHUNK", CHUNK)
        engine = Engine(
            *pair, sampler="coupled", max_slots=2, max_length=MAX_LENGTH, cache_tokens=1024, rounds_per_dispatch=1,
            page_size=8,
        )  # fmt: skip
        made, pages, take = engine.requests(*requests()), [], engine.pages.take
        patch.setattr(engine.pages, "take", lambda *args: pages.append(take(*args)) or pages[-1])
        for _ in engine.run(made, 1):
            pass
        return engine, made, pages


@pytest.mark.usefixtures("x64")
class TestGoldenPair:
    def test_tokens_are_those_of_plain_decoding(self, plain, together, refilled):
        assert [c.token_ids for c in together] == plain
        assert [r.completion.token_ids for r in refilled[1]] == plain
        accepted = sum(sum(c.accepted) for c in together)
        assert accepted > 20 and sum(sum(c.verified) for c in together) - accepted > 20

    def test_drafts_follow_their_request_from_slot_to_slot(self, together, refilled):
        """Tokens cannot tell a drafter that reads another slot's state: it would only be accepted less often."""
        assert [r.completion.accepted for r in refilled[1]] == [c.accepted for c in together]

    def test_drafts_are_those_of_a_dense_pass(self, pair, together, drafts_after):
        """Every round accepts as many drafts as a drafter with freshly made features has right there."""
        rounds = 0
        for prompt, params, out in zip(*requests(), together, strict=True):
            tokens = prompt + out.token_ids
            starts = [len(prompt) + n for n in itertools.accumulate([a + 1 for a in out.accepted[:-1]], initial=0)]
            first = next((i for i, n in enumerate(starts) if n > 1), len(starts))  # one token has no row to start from
            if first == len(starts):
                continue
            proposal = drafts_after(*pair, tokens, starts[first:], params, "coupled").token_RxK
            for drafts, n, accepted in zip(proposal.tolist(), starts[first:], out.accepted[first:], strict=True):
                right = [draft == token for draft, token in zip(drafts, tokens[n:], strict=False)]
                assert accepted == sum(itertools.accumulate(right, lambda a, b: a and b))
                rounds += 1
        assert rounds > 20

    def test_cached_rows_equal_those_of_a_dense_pass(self, pair, refilled):
        """Every row but the last token's, each with its successor, and no rejected one."""
        engine, made, pages = refilled
        drafter, (pool,) = pair[1], engine.caches.draft
        untouched = [r for r in made if not set(pages[r.index]) & set(itertools.chain(*pages[r.index + 1 :]))]
        assert sum(sum(r.completion.accepted) for r in untouched) > 5
        for request in untouched:
            tokens = request.prompt_ids + request.completion.token_ids
            count, padded = len(tokens) - 1, jnp.asarray([tokens + [0] * (MAX_LENGTH - len(tokens))])
            output = hidden_states(engine.target.module, engine.target.params, padded)
            ((k, v),) = drafter.module.apply(
                {"params": drafter.params}, output.taps_NxMH, jnp.arange(MAX_LENGTH), jnp.roll(padded[0], -1),
                drafter.borrowed, method=Eagle3.context,
            )  # fmt: skip
            for stored, dense in ((pool.k_LxPxKVxSxD, k), (pool.v_LxPxKVxSxD, v)):
                by_row = stored[:, np.asarray(pages[request.index])].swapaxes(2, 3)
                cached = by_row.reshape(1, -1, *by_row.shape[3:])
                np.testing.assert_allclose(cached[:, :count], dense[:, :count], rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------- the law


def test_law_of_whole_answers(tiny_target):
    """Three tokens of five, after prompts of two and of one, of which the drafter speaks three; rejection sampler."""
    target = tiny_target("float32", vocab=5, hidden=16, layers=1, max_length=16, sharpness=1.5, context=1.0)
    spoken = np.array([0, 2, 3])
    config = Eagle3Config(draft_decoder(target.config, 1, causal=True), 2, (-1, 0), 1, len(spoken))
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), abstract_drafter(config))
    drafter = Drafter(config, params, borrow(target, spoken))
    engine = Engine(target, drafter, max_slots=512, rounds_per_dispatch=3, cache_tokens=512 * 16)
    prompts = [[3, 1], [4]] * 2048
    outs = engine.generate(prompts, [SamplingParams(max_tokens=3, seed=i) for i in range(4096)])
    assert 500 < sum(sum(c.accepted) for c in outs) < sum(sum(c.verified) for c in outs) - 500
    for start in (0, 1):
        joint = law_of_three(target, prompts[start])
        seen = np.array([c.token_ids for c in outs[start::2]])
        cells = np.bincount(np.ravel_multi_index(tuple(seen.T), joint.shape), minlength=joint.size)
        assert chi_square(cells.reshape(joint.shape), joint) > 1e-4
        assert chi_square(cells.reshape(joint.shape).sum((1, 2)), joint.sum((1, 2))) > 1e-4


def law_of_three(target, prompt: list[int]) -> np.ndarray:
    """`[5, 5, 5]` the probability of every answer."""
    pairs = np.array(list(itertools.product(range(5), repeat=2)))
    tokens = np.concatenate([np.tile(prompt, (25, 1)), pairs], axis=1)
    logits = dense_forward(target.module, target.params, jnp.asarray(tokens)).logits[:, len(prompt) - 1 :]
    p = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    index = np.arange(25)
    joint = p[index, 0, pairs[:, 0], None] * p[index, 1, pairs[:, 1], None] * p[:, 2]
    return joint.reshape(5, 5, 5)


def chi_square(seen: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts against their law; cells too thin for the approximation are thrown together."""
    expected = law.ravel() * seen.sum()
    thin = expected < 5
    seen, expected = (np.append(a[~thin], a[thin].sum()) for a in (seen.ravel(), expected))
    keep = expected > 0
    return scipy.stats.chisquare(seen[keep], expected[keep] * seen.sum() / expected.sum()).pvalue

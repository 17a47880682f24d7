"""Random rounds to verify: hidden states, a head, drafts drawn from a law near the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.draft import Proposal, draft_key
from dspark_jax.decoding.sampling import SlotSampling, draw, log_prob_of
from dspark_jax.decoding.verify import verify
from pallas_kernels import warp as warps
from pallas_kernels.draft_law import Written
from pallas_kernels.fused_verify import Drafts, Head
from pallas_kernels.ragged_attention import Rows, ragged_rows
from pallas_kernels.warp import Warp


@dataclasses.dataclass
class Sizes:
    """R requests with at most K drafts each; `spoken`: every how manieth token the drafter knows."""

    requests: int
    drafts: int
    width: int
    vocab: int
    padding: int = 0  # ids at the end that no token stands for
    spoken: int = 1
    softcap: float = 0.0
    transposed: bool = False
    dtype: str = "float32"


SMALL = [
    Sizes(requests=5, drafts=3, width=16, vocab=331),
    Sizes(requests=5, drafts=3, width=16, vocab=331, padding=9, spoken=3, dtype="bfloat16"),
    Sizes(requests=4, drafts=1, width=24, vocab=1100, softcap=8.0, transposed=True),
    Sizes(requests=1, drafts=16, width=8, vocab=640, spoken=2, softcap=4.0, dtype="bfloat16"),
]


def name_of(sizes: Sizes) -> str:
    return f"{sizes.requests}x{sizes.drafts}-{sizes.vocab}-{sizes.dtype}"


def random_round(
    sizes: Sizes, seed: int, counts: list[int], temperatures: list[float], sampler: str, spread=0.5, limits=None
):
    """Arguments of `fused_verify`; `spread`: how far q is from p; `limits`: top-k, top-p and min-p of each request."""
    rng = np.random.default_rng(seed)
    s, rows_of = sizes, sizes.requests * (sizes.drafts + 1)
    shape = (s.width, s.vocab) if s.transposed else (s.vocab, s.width)
    head = Head(jnp.asarray(rng.normal(size=shape), s.dtype), s.vocab - s.padding, s.softcap, s.transposed)
    hidden = jnp.asarray(rng.normal(size=(rows_of, s.width)) * 2.5 / np.sqrt(s.width), s.dtype)
    warp = Warp.temperatures(jnp.asarray(temperatures, jnp.float32))
    if limits:
        top_k, top_p, min_p = map(jnp.asarray, zip(*limits, strict=True))
        warp = Warp(warp.temperature, top_k, top_p, min_p)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, s.requests), jnp.uint32) for _ in range(2))
    start = jnp.asarray(rng.integers(1, 1000, s.requests), jnp.int32)
    rows = ragged_rows(jnp.asarray(counts, jnp.int32), start, rows_of, s.drafts + 1)
    noise = jnp.asarray(rng.normal(size=(s.requests, s.drafts, s.vocab)) * spread, jnp.float32)
    return hidden, head, rows, propose(hidden, head, rows, warp, key, sampler, noise, s.spoken), warp, key


@jax.jit(static_argnames=("sampler", "spoken"))
def propose(hidden, head, rows: Rows, warp: Warp, key, sampler, noise_RxKxV, spoken) -> Drafts:
    """Every draft drawn as the engine draws it, from the target's logits plus noise: all at once, as R · K requests."""
    requests, drafts, _ = noise_RxKxV.shape
    token_ids, slot = jnp.arange(0, head.num_tokens, spoken, dtype=jnp.int32), jnp.tile(jnp.arange(drafts), requests)
    request = jnp.repeat(jnp.arange(requests), drafts)
    row = jnp.minimum(rows.first_R[request] + slot, len(hidden) - 1)
    start = rows.position_N[jnp.minimum(rows.first_R, len(hidden) - 1)][request]
    logits = head.logits(hidden).astype(jnp.float32)[row] + noise_RxKxV.reshape(len(row), -1)
    warped = warps.apply(logits[:, token_ids], warp.rows(request))
    draft_keys = draft_key(sampler, tuple(word[request] for word in key), start, slot)
    index = draw(warped, warp.rows(request), draft_keys, token_ids)
    token, log_q, warped = (
        a.reshape(requests, drafts, *a.shape[1:]) for a in (token_ids[index], log_prob_of(warped, index), warped)
    )
    return Drafts(token, log_q, Written(warped), token_ids)


@jax.jit(static_argnames=("sampler",))
def from_logits(hidden, head: Head, rows: Rows, drafts: Drafts | None, warp: Warp, key, sampler):
    """The engine's own verification, with all logits in memory: (accepted, next, log-probabilities of all tokens)."""
    sampling = SlotSampling(warp, key, jnp.full((len(rows.count_R), 1), -1))
    proposal = token_ids = None
    if drafts is not None:
        token_ids = drafts.token_ids_Vd
        proposal = Proposal(drafts.token_RxK, drafts.log_q_RxK, drafts.law, drafts.log_q_RxK)
    logits = head.logits(hidden)
    verdict = verify(logits, rows, proposal, token_ids, sampling, sampler)
    return verdict.accepted_R, verdict.next_R, jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def assert_same(got, want, rows, drafts) -> None:
    """Tokens of requests with rows, and the log-probabilities of what they emit."""
    accepted, following, log_probs = map(np.asarray, want)
    live = np.asarray(rows.count_R) > 0
    np.testing.assert_array_equal(np.asarray(got.accepted_R)[live], accepted[live])
    np.testing.assert_array_equal(np.asarray(got.next_R)[live], following[live])
    for r in np.flatnonzero(live):
        emitted = [*([] if drafts is None else np.asarray(drafts.token_RxK)[r, : accepted[r]]), following[r]]
        expected = log_probs[int(rows.first_R[r]) + np.arange(len(emitted)), emitted]
        np.testing.assert_allclose(got.logprob_RxQ[r, : len(emitted)], expected, rtol=1e-5, atol=1e-5)

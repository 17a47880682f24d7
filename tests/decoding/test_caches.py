"""The page pool, the drafter's context in it, and draft blocks in training against the same blocks when serving."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.caches import PageAllocator, PagePool
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.target_io import hidden_states
from dspark_jax.models.drafter import DSpark
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.step import draft_blocks
from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.ragged_attention import ragged_rows

# ------------------------------------------------------------------------------------------------------------- pages

LAYERS, PAGES, SIZE, ROWS, BLOCK, COLUMNS = 2, 7, 3, 8, 4, 3


@settings(max_examples=40, deadline=None)
@given(
    count=st.tuples(st.integers(0, BLOCK), st.integers(0, BLOCK)),
    start=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    table=st.permutations(range(PAGES)),
    keep=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
def test_write_stores_kept_rows_and_nothing_else(count, start, table, keep):
    table = np.asarray(table[: 2 * COLUMNS]).reshape(2, COLUMNS)
    rng = np.random.default_rng(0)
    before = rng.standard_normal((2, LAYERS, PAGES, 3, SIZE, 2)).astype(np.float32)
    new = rng.standard_normal((2, LAYERS, ROWS, 3, 2)).astype(np.float32)
    rows = ragged_rows(jnp.asarray(count), jnp.asarray(start), ROWS, BLOCK)
    after = PagePool(*jnp.asarray(before)).write(*jnp.asarray(new), jnp.asarray(table), rows, jnp.asarray(keep))
    expected, n = before.copy(), 0
    for slot in range(2):
        for offset in range(count[slot]):
            position = start[slot] + offset
            # Rows behind the table's end have no page: they belong to no request's answer.
            if keep[n] and position < COLUMNS * SIZE:
                expected[:, :, table[slot, position // SIZE], :, position % SIZE] = new[:, :, n]
            n += 1
    np.testing.assert_array_equal(np.stack([after.k_LxPxKVxSxD, after.v_LxPxKVxSxD]), expected)


def test_view_reads_what_is_there():
    pool = PagePool(jnp.zeros((1, 4, 1, 2, 2)), jnp.ones((1, 4, 1, 2, 2)))
    table, length = jnp.asarray([[2, 0]]), jnp.asarray([3])
    view = pool.view(table, length)
    assert view.k_LxPxKVxSxD is pool.k_LxPxKVxSxD and view.v_LxPxKVxSxD is pool.v_LxPxKVxSxD
    assert view.table_RxC is table and view.length_R is length and pool.page_size == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_no_page_is_held_twice(steps):
    allocator, held = PageAllocator(10), []
    for take, count in steps:
        if take:
            pages, free = allocator.take(count), 10 - sum(map(len, held))
            assert (pages is None) == (count > free)
            if pages is not None:
                assert len(pages) == count
                held.append(pages)
        elif held:
            allocator.give(held.pop(count % len(held)))
        everything = [page for pages in held for page in pages]
        assert len(set(everything)) == len(everything) and set(everything) <= set(range(10))
    for pages in held:
        allocator.give(pages)
    assert sorted(allocator.take(10)) == list(range(10))


# ------------------------------------------------------------------------------------- the drafter's context (A6, I1)


def test_cached_rows_equal_those_of_a_dense_pass(tiny_target, tiny_drafter, x64, monkeypatch):
    """After a speculative run, prompts in chunks: every accepted row but the last token's, and no rejected one."""
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 8)
    target = tiny_target()
    drafter = tiny_drafter(target, block=3)
    engine = Engine(
        target, drafter, strategy="fixed:2", sampler="coupled", max_slots=3, rounds_per_dispatch=32, page_size=4
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 41, n).tolist() for n in (1, 9, 20)]
    requests = engine.requests(prompts, [SamplingParams(seed=i, max_tokens=17) for i in range(3)])
    for _ in engine.run(requests, 32):
        pass
    for request, pages in zip(requests, handed_out(engine, requests), strict=True):
        tokens = request.prompt_ids + request.completion.token_ids
        assert sum(request.completion.accepted) > 0
        count = len(tokens) - 1
        output = hidden_states(engine.target.module, target.params, jnp.asarray([tokens]))
        unused = jnp.zeros(len(tokens), jnp.int32)
        context = drafter.module.apply(
            {"params": drafter.params}, output.taps_NxMH, jnp.arange(len(tokens)), unused, drafter.borrowed,
            method=DSpark.context,
        )  # fmt: skip
        for (pool,), ((k, v),) in ((engine.caches.target, output.kv), (engine.caches.draft, context)):
            for stored, dense in ((pool.k_LxPxKVxSxD, k), (pool.v_LxPxKVxSxD, v)):
                by_row = stored[:, np.asarray(pages)].swapaxes(2, 3)
                cached = by_row.reshape(len(stored), -1, *by_row.shape[3:])
                np.testing.assert_allclose(cached[:, :count], dense[:, :count], rtol=1e-9, atol=1e-9)
                # Rejected drafts were never written: what lies behind the answer is as empty as at the start.
                assert not np.any(cached[:, count:])


def handed_out(engine, requests):
    """The pages of requests that started together on a fresh engine: the allocator hands them out in order."""
    fresh = PageAllocator(engine.pages.total)
    return [fresh.take(-(-(len(r.prompt_ids) + r.max_tokens) // engine.page_size)) for r in requests]


# ------------------------------------------------------------------------------------- training and serving agree (A6)


@pytest.mark.parametrize("spoken", [None, range(0, 41, 3)], ids=["full", "reduced"])
def test_training_blocks_equal_served_blocks(tiny_target, tiny_drafter, drafts_after, spoken):
    target = tiny_target("float32")
    drafter = tiny_drafter(target, "bigram", block=4, spoken=spoken, noise=0.5)
    size = drafter.config.block_size
    tokens = np.random.default_rng(1).integers(0, 40, 50).tolist()
    anchors = [0, 1, 7, 15, 16, 31, 44]
    served = drafts_after(
        target, drafter, tokens, [a + 1 for a in anchors], SamplingParams(temperature=0.0), "rejection"
    )
    # One sequence for each anchor, which goes on as the drafter did: teacher forcing then sees the same tokens.
    sequences = np.stack(
        [np.resize(tokens[: a + 1] + served.token_RxK[i].tolist() + [0] * 60, 56) for i, a in enumerate(anchors)]
    )
    taps = target.with_taps(drafter.config.tap_layers)(sequences).taps
    keep = jnp.ones((len(anchors), 1), bool)
    blocks = make_blocks(jnp.asarray(sequences), jnp.ones(sequences.shape), jnp.asarray(anchors)[:, None], keep, size)
    logits, confidence = jax.jit(draft_blocks, static_argnums=0)(
        drafter.module, drafter.params, drafter.borrowed, taps, blocks
    )
    np.testing.assert_allclose(logits[:, 0], served.law.warped_RxKxVd, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(confidence[:, 0], served.confidence_RxK, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def packed(tiny_target, tiny_drafter):
    """logits(tokens, taps) of blocks at anchors 5 and 20 and a dummy, packed into one sequence."""
    target = tiny_target("float32")
    drafter = tiny_drafter(target, "random", block=4)
    keep = jnp.asarray([[True, True, False]])

    @jax.jit
    def logits(tokens, taps):
        blocks = make_blocks(tokens[None], jnp.ones((1, 32)), jnp.asarray([[5, 20, 0]]), keep, 4)
        return draft_blocks(drafter.module, drafter.params, drafter.borrowed, taps[None], blocks)[0][0]

    rng = np.random.default_rng(2)
    width = 2 * target.config.hidden_size
    return logits, rng.integers(0, 40, 32), rng.standard_normal((32, width)).astype(np.float32)


def test_blocks_do_not_see_each_other(packed):
    """A5: another block's anchor and tokens change nothing."""
    logits, tokens, taps = packed
    changed = np.where(np.arange(32) >= 20, (tokens + 1) % 40, tokens)
    a, b = logits(tokens, taps), logits(changed, taps)
    np.testing.assert_array_equal(a[0], b[0])
    assert np.abs(a[1] - b[1]).max() > 0.01


def test_blocks_see_the_context_before_their_anchor_only(packed):
    """The anchor's own features do not exist yet when serving."""
    logits, tokens, taps = packed
    a = logits(tokens, taps)
    for first, changes in ((5, False), (4, True)):
        b = logits(tokens, np.where(np.arange(32)[:, None] >= first, taps + 1, taps))
        assert (np.abs(a[0] - b[0]).max() > 1e-3) == changes


def test_dummy_blocks_attend_to_nothing():
    rng = np.random.default_rng(0)
    shapes = ((1, 2, 3, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8), (1, 2, 3, 2, 8), (1, 2, 3, 2, 8))
    q, k, v, k_block, v_block = (jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
    out = anchor_attention(q, k, v, k_block, v_block, jnp.asarray([[3, 0]]), jnp.asarray([[True, False]]), 0.3)
    assert np.all(out[0, 1] == 0) and np.all(out[0, 0] != 0)
    # An anchor at the start has no context: the block's own slots alone.
    first = anchor_attention(q, k, v, k_block, v_block, jnp.asarray([[0, 0]]), jnp.asarray([[True, True]]), 0.3)
    alone = anchor_attention(q, k * 0, v * 9, k_block, v_block, jnp.asarray([[0, 0]]), jnp.asarray([[True, True]]), 0.3)
    np.testing.assert_array_equal(first, alone)

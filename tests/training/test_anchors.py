"""Anchors and labels on cases small enough to write down."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.training.anchors import make_blocks, sample_anchors

# The reference's own vector: learn 6..18 but not 12.
MASK = np.array([[1.0 if 6 <= i <= 18 and i != 12 else 0.0 for i in range(20)]])
TOKENS = np.arange(100, 120)[None]


def test_candidates_need_themselves_and_the_next_token():
    anchors, keep = sample_anchors(jax.random.key(0), MASK, 32)
    assert np.asarray(anchors)[np.asarray(keep)].tolist() == [6, 7, 8, 9, 10, 13, 14, 15, 16, 17]


def test_labels_stop_at_the_first_token_that_is_not_learnt():
    blocks = make_blocks(TOKENS, MASK, jnp.array([[8, 17]]), jnp.array([[True, True]]), 4)
    assert np.asarray(blocks.label_BxNxK)[0, 0].tolist() == [109, 110, 111, 112]
    assert np.asarray(blocks.eval_BxNxK)[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert np.asarray(blocks.previous_BxNxK)[0, 0].tolist() == [108, 109, 110, 111]
    assert np.asarray(blocks.source_BxNxK)[0, 0].tolist() == [8, 9, 10, 11]


def test_a_block_that_runs_past_the_end_is_cut():
    mask = np.ones((1, 20))
    blocks = make_blocks(TOKENS, mask, jnp.array([[18]]), jnp.array([[True]]), 4)
    assert np.asarray(blocks.eval_BxNxK)[0, 0].astype(int).tolist() == [1, 0, 0, 0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 5))
def test_anchors_are_distinct_candidates_in_order_and_dummies_come_last(learnt, wanted, seed):
    mask = np.array([learnt], np.float32)
    anchors, keep = (np.asarray(a)[0] for a in sample_anchors(jax.random.key(seed), mask, wanted))
    candidates = [i for i in range(len(learnt) - 1) if learnt[i] and learnt[i + 1]]
    chosen = anchors[keep].tolist()
    assert len(anchors) == wanted and len(chosen) == min(len(candidates), wanted)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(candidates)
    assert keep.tolist() == sorted(keep.tolist(), reverse=True) and not anchors[~keep].any()


def test_every_candidate_is_as_likely_as_any_other():
    keys = jax.random.split(jax.random.key(1), 4000)
    anchors = jax.vmap(lambda key: sample_anchors(key, jnp.asarray(MASK), 3)[0])(keys)
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=20)[[6, 7, 8, 9, 10, 13, 14, 15, 16, 17]]
    assert np.abs(counts - 1200).max() < 5 * np.sqrt(1200)


def test_dummy_blocks_learn_nothing():
    blocks = make_blocks(TOKENS, MASK, jnp.array([[0, 8]]), jnp.array([[False, True]]), 4)
    assert not np.asarray(blocks.eval_BxNxK)[0, 0].any()

"""Packs: documents stay apart, anchors are the rows' own, and a step is the same however it is divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.batches import Batches, Sample
from dspark_jax.data.packing import ALIGN, MicroBatch, bucket, draw_anchors, micro_batches
from dspark_jax.interop.drafter_tensors import abstract_drafter, drafter_module
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.features import Features, FeatureSource, target_features
from dspark_jax.training.losses import LossWeights
from dspark_jax.training.step import Setup, TrainState, drafter_loss, run_backbone, run_context
from dspark_jax.training.update import train_step
from pallas_kernels import anchor_attention

VOCAB, HIDDEN, SLOTS = 13, 8, 3
ATTENTION = Attention(num_kv_heads=1, head_dim=4, rope=Rope(100.0), causal=False)
DECODER = DecoderConfig("qwen3", VOCAB, HIDDEN, 8, 2, (ATTENTION,), (0, 0), qk_norm=True, tied=False)
CONFIG = DrafterConfig(DECODER, SLOTS, VOCAB - 1, (0, 1), 3, 11, markov_rank=4)


def samples_of(lengths, seed=0, epoch=0):
    """Documents of random tokens that learn about three quarters of them."""
    rng = np.random.default_rng(seed)
    return [
        Sample(7 * i, epoch, rng.integers(0, VOCAB - 1, n).tolist(), (rng.random(n) < 0.75).astype(np.uint8))
        for i, n in enumerate(lengths)
    ]


# -------------------------------------------------------------------------------------------------- anchors and packs


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 5))
def test_drawn_anchors_are_distinct_candidates_in_order(learnt, wanted, seed):
    anchors = draw_anchors(seed, Sample(3, 1, [0] * len(learnt), np.array(learnt, np.uint8)), wanted).tolist()
    candidates = {i for i in range(len(learnt) - 1) if learnt[i] and learnt[i + 1]}
    assert len(anchors) == min(len(candidates), wanted)
    assert anchors == sorted(set(anchors)) and set(anchors) <= candidates


def test_every_candidate_is_as_likely_in_every_epoch():
    mask = np.array([1 if 6 <= i <= 18 and i != 12 else 0 for i in range(20)], np.uint8)
    drawn = [draw_anchors(0, Sample(row, epoch, [0] * 20, mask), 3) for row in range(80) for epoch in range(50)]
    counts = np.bincount(np.concatenate(drawn), minlength=20)[[6, 7, 8, 9, 10, 13, 14, 15, 16, 17]]
    assert np.abs(counts - 1200).max() < 5 * np.sqrt(1200)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
def test_packs_hold_every_document_once_with_its_own_anchors(lengths, packs, num_anchors, at_once):
    samples = samples_of(lengths + [20] * packs)
    parts = micro_batches(samples, packs, num_anchors, at_once, seed=5)
    assert len({part.pack.token_DxT.shape for part in parts}) == len({p.pack.anchor_DxCxN.shape for p in parts}) == 1
    seen = [document.row for part in parts for document in part.documents]
    assert sorted(seen) == [sample.row for sample in samples]
    by_row = {sample.row: sample for sample in samples}
    for pack, documents in parts:
        token, mask, position = pack.token_DxT[0], pack.loss_mask_DxT[0], pack.position_DxT[0]
        anchors, keep = pack.anchor_DxCxN.ravel(), pack.keep_DxCxN.ravel()
        free, expected = np.ones(len(token), bool), []
        for row, _, start, length in documents:
            span, sample = slice(start, start + length), by_row[row]
            assert start % ALIGN == 0 and free[span].all() and len(free[span]) == length
            assert token[span].tolist() == sample.token_ids and (mask[span] == sample.loss_mask).all()
            assert position[span].tolist() == list(range(length))
            expected += (start + draw_anchors(5, sample, num_anchors)).tolist()
            free[span] = False
        assert not mask[free].any() and not position[free].any()
        assert anchors[keep].tolist() == sorted(expected) and keep.tolist() == sorted(keep, reverse=True)


def test_lengths_have_four_sizes_an_octave_and_pad_little():
    sizes = [bucket(n) for n in range(1, 4097)]
    assert sorted(set(sizes))[:6] == [64, 80, 96, 112, 128, 160] and len(set(sizes)) == 25
    assert all(size >= n and size % ALIGN == 0 for n, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * n + ALIGN for n, size in enumerate(sizes, 1) if n > 64)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (11, 4), (5, 4), (7, 7)])
def test_every_row_is_seen_once_an_epoch_wherever_a_run_begins(rows, batch_size, pads):
    """A run that was killed at any step goes on with a fresh object, which knows the step alone."""
    data = [{"prompt_ids": [1] * (1 + i), "answer_ids": [2] * (8 + i)} for i in range(rows)]
    make = lambda: Batches(data, batch_size, 64, seed=3, pads=pads)  # noqa: E731
    unbroken = make()
    stream = [unbroken.samples(step) for step in range(3 * rows)]
    flat = [(sample.epoch, sample.row) for step in stream for sample in step]
    assert flat == sorted(flat, key=lambda place: place[0])
    for epoch in range(3):
        assert sorted(row for e, row in flat if e == epoch) == list(range(rows))
    orders = {tuple(row for e, row in flat if e == epoch) for epoch in range(3)}
    assert pads or len(orders) == 3  # where batches pad, few rows have few orders
    for step in range(0, 3 * rows, 2):
        ours = [(s.epoch, s.row, s.token_ids) for s in make().samples(step)]
        assert ours == [(s.epoch, s.row, s.token_ids) for s in stream[step]]


# ------------------------------------------------------------------------------------------------------- whole updates


@pytest.fixture(scope="module")
def case():
    """Setup, tables, parameters and features of eight documents, in float64."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.5)  # noqa: E731
        params = jax.tree.map(lambda a: draw(*a.shape), abstract_drafter(CONFIG))
        ids = jnp.delete(jnp.arange(VOCAB), jnp.array([4, 9]))
        borrowed = Borrowed(draw(VOCAB, HIDDEN), draw(len(ids), HIDDEN), ids)
        setup = Setup(drafter_module(CONFIG), LossWeights(ce=0.4), 4, optax.sgd(0.1))
        samples = samples_of([40, 9, 64, 17, 3, 30, 48, 16], epoch=2)
        features = {
            s.row: Features(*(np.asarray(draw(len(s.token_ids), *w)) for w in ((16,), (8,), ()))) for s in samples
        }
        yield setup, borrowed, params, samples, features


def laid_out(features, part):
    """A pack's features; garbage between the documents, which nothing may read."""
    shape = part.token_BxS.shape
    out = [np.full((*shape, *a.shape[1:]), 3.0) for a in jax.tree.leaves(next(iter(features.values())))]
    for document in part.documents:
        for whole, own in zip(out, jax.tree.leaves(features[document.row]), strict=True):
            whole[document.pack, document.start : document.start + document.length] = own
    return Features(*map(jnp.asarray, out))


def update(case, num_packs, at_once, samples=None, together=False):
    """Parameters and metrics after a step. `together`: all packs in one micro-batch, as on several devices."""
    setup, borrowed, params, own, features = case
    state = TrainState(jax.tree.map(jnp.array, params), setup.optimizer.init(params), jnp.zeros((), jnp.int32))
    parts = micro_batches(own if samples is None else samples, num_packs, 4, at_once, seed=1)
    if together:
        documents = [d._replace(pack=i) for i, part in enumerate(parts) for d in part.documents]
        parts = [MicroBatch(jax.tree.map(lambda *a: np.concatenate(a), *(p.pack for p in parts)), documents)]
    return train_step(setup, borrowed, state, functools.partial(laid_out, features), parts)


@pytest.fixture(scope="module")
def undivided(case):
    with jax.enable_x64(True):
        return update(case, 1, 100)


def same(got, wanted, tolerance=1e-10):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, wanted)


def test_a_packed_step_is_the_gradient_of_the_loss_over_padded_sequences(case, undivided, x64):
    """One sequence a row, all blocks at once, and the gradient by automatic differentiation."""
    setup, borrowed, params, samples, features = case
    width = max(len(s.token_ids) for s in samples)
    pad = lambda a: np.pad(a, [(0, width - len(a))] + [(0, 0)] * (np.ndim(a) - 1))  # noqa: E731
    token, mask = (np.stack([pad(np.asarray(s[i])) for s in samples]) for i in (2, 3))
    drawn = [draw_anchors(1, s, 4) for s in samples]
    anchor = np.stack([np.pad(a, (0, 4 - len(a))) for a in drawn])
    keep = np.arange(4) < np.array([len(a) for a in drawn])[:, None]
    dense = jax.tree.map(lambda *a: jnp.asarray(np.stack([pad(x) for x in a])), *(features[s.row] for s in samples))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        blocks = make_blocks(jnp.asarray(token), jnp.asarray(mask), jnp.asarray(anchor), jnp.asarray(keep), SLOTS)
        return drafter_loss(setup, params, borrowed, dense, blocks)

    (value, (_, sums)), grads = jax.jit(loss)(params)
    state, metrics = undivided
    assert int(metrics["blocks"]) == keep.sum() > 20
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-8)
    same(metrics["sums"], sums)
    same(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


@pytest.mark.parametrize(("num_packs", "at_once", "together"), [(4, 3, False), (2, 7, True)])
def test_a_step_is_the_same_however_it_is_divided(case, undivided, x64, monkeypatch, num_packs, at_once, together):
    monkeypatch.setattr(anchor_attention, "SMALL", 0)  # in tiles, where the undivided step has all scores at once
    (state, metrics), (wanted, wanted_metrics) = update(case, num_packs, at_once, together=together), undivided
    assert abs(float(metrics["loss"]) - float(wanted_metrics["loss"])) < 1e-10
    same(
        (state.params, metrics["sums"], metrics["blocks"]),
        (wanted.params, wanted_metrics["sums"], wanted_metrics["blocks"]),
    )


def test_dpace_weighs_the_slots_of_all_packs_before_it_divides(case, undivided, x64):
    """Its weights are the drafter's doing: they take a pass over the update before gradients are made."""
    setup = dataclasses.replace(case[0], weights=dataclasses.replace(case[0].weights, dpace=0.5))
    (state, metrics), (parted, again) = (update((setup, *case[1:]), *division) for division in ((1, 100), (4, 3)))
    np.testing.assert_allclose(again["loss"], metrics["loss"], rtol=1e-10)
    same(again["sums"], metrics["sums"])
    same(parted.params, state.params)
    assert abs(metrics["loss"] - undivided[1]["loss"]) > 1e-3


def test_the_order_of_the_samples_changes_nothing(case, undivided, x64):
    """Anchors are a row's own, whoever its neighbours are."""
    state, metrics = update(case, 1, 100, samples=case[3][::-1])
    np.testing.assert_allclose(metrics["loss"], undivided[1]["loss"], rtol=1e-12)
    same(state.params, undivided[0].params)


def test_blocks_see_their_own_document_before_their_anchor_alone(case, x64):
    """The gradient of one block's hidden states with respect to everything that it could read."""
    setup, borrowed, params, samples, features = case
    (part,) = micro_batches(samples, 1, 4, 100, seed=1)
    pack, keep = part.pack, part.pack.keep_DxCxN[:, 0]
    blocks = make_blocks(
        *map(jnp.asarray, (pack.token_DxT, pack.loss_mask_DxT, pack.anchor_DxCxN[:, 0], keep)), SLOTS,
        jnp.asarray(pack.position_DxT),
    )  # fmt: skip

    @jax.jit
    def hidden(taps):
        context_kv = run_context(setup.drafter, params, borrowed, taps, jnp.asarray(pack.position_DxT))
        return run_backbone(setup.drafter, params, borrowed, context_kv, blocks)

    taps = laid_out(features, part).taps_BxSxMH
    out, pull = jax.vjp(hidden, taps)
    pull = jax.jit(pull)
    for n in np.flatnonzero(keep[0])[::3]:
        (moved,) = pull(jnp.zeros_like(out).at[n].set(1.0))
        read = np.flatnonzero(np.any(moved[0] != 0, axis=-1))
        anchor = int(pack.anchor_DxCxN[0, 0, n])
        assert read.tolist() == list(range(anchor - int(pack.position_DxT[0, anchor]), anchor))
    # Labels and what is learnt stop where the document does.
    ends = np.array([max(d.start + d.length for d in part.documents if d.start <= a) for a in blocks.anchor_BxN[0]])
    index = np.asarray(blocks.anchor_BxN)[0, :, None] + 1 + np.arange(SLOTS)
    assert not np.any(np.asarray(blocks.eval_BxNxK)[0] & (index >= ends[:, None]))


def test_another_document_moves_no_loss(case, x64):
    """A document's loss and gradients beside neighbours that change: their blocks learn nothing here."""
    samples = [s if i == 2 else s._replace(loss_mask=np.zeros_like(s.loss_mask)) for i, s in enumerate(case[3])]
    other = [
        s if i == 2 else s._replace(token_ids=[(t + 1) % (VOCAB - 1) for t in s.token_ids])
        for i, s in enumerate(samples)
    ]
    row, rng = case[3][2].row, np.random.default_rng(9)
    moved = {
        r: f if r == row else jax.tree.map(lambda a: a + rng.standard_normal(a.shape), f) for r, f in case[4].items()
    }
    (state, metrics), (again, others) = update(case, 1, 100, samples), update((*case[:4], moved), 1, 100, other)
    assert float(metrics["loss"]) == float(others["loss"]) > 0
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_a_pack_without_anything_to_learn_is_no_error(case, x64):
    nothing = [s._replace(loss_mask=np.zeros_like(s.loss_mask)) for s in case[3]]
    state, metrics = update(case, 1, 100, nothing)
    assert float(metrics["loss"]) == 0 and int(metrics["blocks"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, case[2])


# ------------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("name", [pytest.param("target", marks=pytest.mark.slow), "gemma4_keqv_target"])
def test_packed_documents_have_the_features_of_the_documents_alone(golden, x64, monkeypatch, name):
    monkeypatch.setattr(anchor_attention, "SMALL", 64**2 * 32)  # packs in tiles, one document at once
    target = load_target(golden / name, dtype="float64", tap_layers=(0, 2))
    samples = samples_of([40, 9, 64, 17, 3, 30])
    (part,) = micro_batches(samples, 1, 4, 100, seed=0)
    packed = FeatureSource(target, keep=False)(part)
    by_row = {sample.row: sample for sample in samples}
    for document in part.documents:
        padded = np.pad(by_row[document.row].token_ids, (0, 64 - document.length))
        alone = target_features(target.module, target.params, jnp.asarray(padded[None]))
        for ours, theirs in zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True):
            ours = ours[0, document.start : document.start + document.length]
            np.testing.assert_allclose(ours, theirs[0, : document.length], rtol=1e-9, atol=1e-11)

"""Domino's curriculum: the cross entropy moves from the backbone's logits to the head's over the run (2605.29707)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.data.batches import Batch, Sample
from dspark_jax.data.packing import micro_batches
from dspark_jax.interop.drafter_tensors import abstract_drafter, drafter_module
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.features import Features
from dspark_jax.training.losses import LossWeights
from dspark_jax.training.step import Setup, TrainState, drafter_loss
from dspark_jax.training.update import train_step

VOCAB, HIDDEN, LENGTH, STEPS = 11, 8, 16, 8
ATTENTION = Attention(num_kv_heads=1, head_dim=4, rope=Rope(100.0), causal=False)
DECODER = DecoderConfig("qwen3", VOCAB, HIDDEN, 8, 2, (ATTENTION,), (0,), qk_norm=True, tied=False)
CONFIG = DrafterConfig(
    DECODER, 4, VOCAB - 1, (0, 1), 3, VOCAB, logits_start=1, markov_rank=4, head_type="domino", gru_width=6,
    pure_prefix=1, confidence=False,
)  # fmt: skip
ONLY_CE = LossWeights(ce=1.0, l1=0.0, confidence=0.0, decay_gamma=7.0)
CURRICULUM = dataclasses.replace(ONLY_CE, curriculum=STEPS)


@pytest.fixture(scope="module")
def parts():
    """Random parameters, tables, features and a batch."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    params = jax.tree.map(lambda a: draw(*a.shape), abstract_drafter(CONFIG))
    borrowed = Borrowed(draw(VOCAB, HIDDEN), draw(VOCAB, HIDDEN), jnp.arange(VOCAB))
    hidden = draw(2, LENGTH, HIDDEN)
    features = Features(draw(2, LENGTH, CONFIG.tap_width), hidden, jax.nn.logsumexp(hidden @ borrowed.head_VdxH.T, -1))
    token = rng.integers(0, VOCAB - 1, (2, LENGTH)).astype(np.int32)
    return params, borrowed, features, Batch(token, np.ones((2, LENGTH), np.float32), np.array([16, 16]), np.arange(2))


@pytest.fixture(scope="module")
def at(parts):
    """at(weights, share) -> the loss of fixed blocks and its gradients, with that share of the backbone's logits."""
    params, borrowed, features, batch = parts
    anchors, keep = jnp.asarray([[1, 5, 9], [2, 7, 0]]), jnp.asarray([[True, True, True], [True, True, False]])
    blocks = make_blocks(batch.token_BxS, batch.loss_mask_BxS, anchors, keep, CONFIG.num_drafts)

    def loss(params, weights, share):
        setup = Setup(drafter_module(CONFIG), weights, num_anchors=3, optimizer=None)
        return drafter_loss(setup, params, borrowed, features, blocks, share)

    program = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    return lambda weights, share: program(params, weights, jnp.float32(share))


def largest(tree) -> float:
    return max(float(jnp.abs(a).max()) for a in jax.tree.leaves(tree))


def test_the_head_learns_nothing_at_first_and_the_backbone_all_along(at):
    first, last = at(CURRICULUM, 1.0)[1], at(CURRICULUM, 0.0)[1]
    assert largest(first["markov_head"]) == 0 < 1e-3 < largest(last["markov_head"])
    assert min(largest(first["backbone"]), largest(last["backbone"])) > 1e-3


def test_the_loss_lies_between_base_and_final(at):
    (base, (terms, _)), _ = at(CURRICULUM, 1.0)
    (final, _), _ = at(CURRICULUM, 0.0)
    assert abs(base - final) > 0.05
    np.testing.assert_allclose(base, terms.base_ce / terms.ce_weight, rtol=1e-5)
    np.testing.assert_allclose(at(CURRICULUM, 0.25)[0][0], 0.25 * base + 0.75 * final, rtol=1e-6)
    # Off, the loss is the final logits', and the backbone's are not even looked at.
    np.testing.assert_allclose(at(ONLY_CE, 0.0)[0][0], final, rtol=1e-6)


def test_base_logits_are_those_of_a_silent_head(at, parts):
    """The base loss is the loss of the same backbone whose head adds nothing."""
    params, *_ = parts
    base = at(CURRICULUM, 1.0)[0][0]
    head = params["markov_head"]["up_proj"]
    params["markov_head"]["up_proj"] = jnp.zeros_like(head)
    silent = at(ONLY_CE, 0.0)[0][0]
    params["markov_head"]["up_proj"] = head
    np.testing.assert_allclose(silent, base, rtol=1e-6)


def test_the_share_falls_linearly_from_one_to_zero():
    assert [float(CURRICULUM.base_share(step)) for step in (0, 2, 4, 8, 9, 100)] == [1.0, 0.75, 0.5, 0.0, 0.0, 0.0]
    assert ONLY_CE.base_share(3) == 0.0


def test_a_resumed_run_goes_on_with_the_same_share(parts):
    """The share is a function of the state's step alone; half the run later the head has learnt."""
    params, borrowed, features, batch = parts
    setup = Setup(drafter_module(CONFIG), CURRICULUM, num_anchors=4, optimizer=optax.sgd(0.05))
    samples = [Sample(i, 0, ids.tolist(), np.ones(LENGTH)) for i, ids in enumerate(batch.token_BxS)]
    packs = micro_batches(samples, count=2, num_anchors=4, blocks_at_once=3, seed=0)
    padded = jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, 48)] + [(0, 0)] * (a.ndim - 2)), features)

    def source(part):
        return jax.tree.map(lambda a: a[part.documents[0].row][None], padded)

    def run(state, steps):
        losses = []
        for _ in range(steps):
            state, metrics = train_step(setup, borrowed, state, source, packs)
            losses.append(float(metrics["loss"]))
        return jax.device_get(state), losses

    def start():
        fresh = jax.tree.map(jnp.array, params)
        return TrainState(fresh, setup.optimizer.init(fresh), jnp.zeros((), jnp.int32))

    whole, expected = run(start(), 4)
    saved, first = run(start(), 2)
    resumed, second = run(jax.tree.map(jnp.array, saved), 2)
    assert first + second == expected and int(resumed.step) == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    # At step 0 the head stands still; from step 1 on it moves.
    one, _ = run(start(), 1)
    moved = [largest(jax.tree.map(jnp.subtract, s.params["markov_head"], params["markov_head"])) for s in (one, saved)]
    assert moved[0] == 0 < moved[1]

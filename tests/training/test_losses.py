"""Loss terms and metrics where the answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.losses import (
    LossWeights,
    block_loss,
    metric_sums,
    slot_weights,
    total_variation,
    wholes,
)  # fmt: skip
from dspark_jax.training.position_weights import dpace_weights
from dspark_jax.training.step import learning_rate
from pallas_kernels.distribution_loss import Rows, Targets, Vocabulary


def loss_of(logits, label=None, accept_logits=0.0, eval_mask=None, target=None, whole=None, **weights):
    """Loss, terms and acceptance of blocks whose shape is that of `logits` [..., K, V]; the rest has a plain default.

    The head is the identity: hidden states are logits.
    """
    slots, vocab = logits.shape[:-1], logits.shape[-1]
    label = jnp.zeros(slots, int) if label is None else label
    eval_mask = jnp.ones(slots, bool) if eval_mask is None else eval_mask
    target = jax.nn.log_softmax(logits) if target is None else target
    count = label.size
    rows = Rows(logits.reshape(count, vocab), None, label.reshape(count), jnp.arange(count))
    targets = Targets(target.reshape(count, vocab), jnp.zeros(count))
    vocabulary = Vocabulary(jnp.eye(vocab), None)
    confidence = jnp.full(slots, accept_logits)
    return block_loss(rows, targets, vocabulary, confidence, eval_mask, LossWeights(**weights), whole=whole)


def terms_of(*args, **options):
    return loss_of(*args, **options)[1]


def test_position_weights_decay_by_four():
    assert float(terms_of(jnp.zeros((1, 1, 7, 3))).weight) == pytest.approx(3.73521, abs=1e-4)


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never():
    p = jnp.log(jnp.array([[0.2, 0.8, 1e-30], [1.0, 1e-30, 1e-30]]))
    q = jnp.log(jnp.array([[0.2, 0.8, 1e-30], [1e-30, 0.5, 0.5]]))
    assert np.asarray(total_variation(q, p, reduced=False)) == pytest.approx([0, 1], abs=1e-6)


def test_mass_outside_a_reduced_vocabulary_counts_as_missed():
    p = jnp.log(jnp.array([0.3, 0.2]))  # half of the target's mass has no draft token
    # q is (.6, .4): half of |.6 - .3| + |.4 - .2| + .5.
    assert float(total_variation(p, p, reduced=True)) == pytest.approx(0.5)


def test_a_label_that_the_drafter_cannot_say_costs_no_cross_entropy():
    logits = jnp.array([[[[2.0, 0.0], [0.0, 1.0]]]])
    both = terms_of(logits, jnp.array([[[0, 1]]]), decay_gamma=0)
    one = terms_of(logits, jnp.array([[[0, -1]]]), decay_gamma=0)
    assert float(both.ce_weight) == 2 and float(one.ce_weight) == 1
    assert float(one.ce) == pytest.approx(float(jnp.log1p(jnp.exp(-2.0))))


def test_expected_tokens_of_a_round():
    accept = jnp.array([[[0.5, 0.5], [1.0, 1.0]]])
    eval_mask = jnp.array([[[True, True], [True, False]]])
    terms = terms_of(jnp.zeros((1, 2, 2, 2)), eval_mask=eval_mask)
    sums = metric_sums(terms, accept, jnp.zeros((1, 2, 2)), eval_mask)
    num, den = sums["tau_probabilistic"]
    assert float(num / den) == pytest.approx(((1 + 0.5 + 0.25) + (1 + 1)) / 2)
    assert np.asarray(sums["accept_rate"][0] / sums["accept_rate"][1]) == pytest.approx([0.75, 0.5])


def test_the_label_of_confidence_has_no_gradient():
    def loss(logits):
        target = jnp.log(jnp.array([[[[0.7, 0.3]]]]))
        return loss_of(logits, accept_logits=1.0, target=target, ce=0.0, l1=0.0)[0]

    value, slope = jax.value_and_grad(loss)(jnp.array([[[[1.0, 0.0]]]]))
    assert value > 0.1 and not np.asarray(slope).any()


def test_micro_steps_add_up_to_the_mean_asked_for():
    """Two micro-steps of unequal size, one token mean; and by the reference's rule the mean of their two means."""
    rng = np.random.default_rng(0)
    logits, target = (jnp.asarray(rng.standard_normal((4, 3, 5)), jnp.float32) for _ in range(2))
    target = jax.nn.log_softmax(target)
    eval_mask = jnp.arange(3) < jnp.array([1, 1, 3, 3])[:, None]
    label = jnp.where(rng.random((4, 3)) < 0.3, -1, 1)
    halves = [slice(0, 2), slice(2, 4)]

    def loss(part=slice(None), **options):
        return loss_of(logits[part], label[part], 0.5, eval_mask[part], target[part], **options)[0]

    each = [slot_weights(label[half], eval_mask[half], LossWeights().decay_gamma).sum() for half in halves]
    tokens, reference = (
        sum(loss(half, whole=whole) for half, whole in zip(halves, wholes(each, mean), strict=True))
        for mean in ("tokens", "reference")
    )
    assert float(tokens) == pytest.approx(float(loss()), rel=1e-6)
    assert float(reference) == pytest.approx(float(np.mean([loss(half) for half in halves])), rel=1e-6)
    assert abs(tokens - reference) > 1e-2


def test_an_update_without_slots_costs_nothing():
    logits = jnp.ones((1, 1, 2, 3))
    assert float(loss_of(logits, eval_mask=jnp.zeros((1, 1, 2), bool))[0]) == 0


def test_the_schedule_is_the_references_with_its_hand_over():
    rate = learning_rate(1.0, 20, 0.2)
    got = [float(rate(step)) for step in range(20)]
    expected = [0.25, 0.5, 0.75, 1, 1.009701, 1, 0.971271, 0.924618]
    assert got[:8] == pytest.approx(expected, abs=1e-6)
    assert got[-3:] == pytest.approx([0.085083, 0.038429, 0.009701], abs=1e-6)


def test_dpace_weighs_slots_by_what_is_reached_and_what_may_follow():
    learnt = jnp.array([[True, True, True], [True, True, False]])
    got = dpace_weights(jnp.array([[0.5, 0.0, 1.0], [1.0, 0.5, 0.9]]), learnt, alpha=0.5)
    # Smoothed: .75, .5, 1 and 1, .75; products .75, .375, .375 and 1, .75; sums from each slot on.
    assert np.asarray(got) == pytest.approx(np.array([[1.5, 0.75, 0.375], [1.75, 0.75, 0]]))
    left = dpace_weights(jnp.zeros((2, 3)), learnt, alpha=1.0)
    assert np.asarray(left) == pytest.approx(np.array([[3, 2, 1], [2, 1, 0]]))


def test_dpace_replaces_the_decay_in_the_cross_entropy_alone():
    logits = jnp.array([[[[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]]]])
    label = jnp.array([[[0, 1, -1]]])
    target = jnp.log(jnp.full((1, 1, 3, 2), 0.5))
    plain = terms_of(logits, label, target=target)
    terms = terms_of(logits, label, target=target, dpace=0.5)
    confidence = np.array([1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0)), 0])
    weights = np.asarray(dpace_weights(confidence, np.ones(3, bool), 0.5)) * [1, 1, 0]
    assert float(terms.ce) == pytest.approx(float(-(weights[:2] * np.log(confidence[:2])).sum()), rel=1e-5)
    assert float(terms.ce_weight) == pytest.approx(weights.sum(), rel=1e-5)
    assert float(terms.l1) == float(plain.l1) and float(terms.weight) == float(plain.weight)


def test_the_weights_of_dpace_have_no_gradient():
    def share(logit):
        terms = terms_of(jnp.array([[[[0.0, 0.0], [0.0, 0.0]]]]) + logit, dpace=0.5)
        return terms.ce_weight

    assert not np.asarray(jax.grad(share)(jnp.ones((1, 1, 2, 2)))).any()

"""Optimizers by name: which leaves Muon takes, what an update looks like, and that all of them learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.errors import UserError
from dspark_jax.training.optimizers import MUON_RMS, make_optimizer, muon_labels
from dspark_jax.training.step import averaged

NAMES = ("adamw", "muon", "adafactor")


def constant(step):
    return 0.01


def drafter_like():
    """The kinds of leaves that drafters have."""
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    layers = {"q_proj": {"kernel": draw(0, 3, 8, 12)}, "q_norm": {"scale": jnp.ones((3, 4))}}
    return {
        "backbone": {"fc": {"kernel": draw(1, 16, 8)}, "layers": (layers,), "norm": {"scale": jnp.ones(8)}},
        "markov_head": {"markov_w1": draw(2, 32, 4), "gate_proj": {"kernel": draw(3, 12, 4), "bias": jnp.zeros(4)}},
        "confidence_head": {"proj": {"kernel": draw(4, 12, 1), "bias": jnp.zeros(1)}},
    }


def update_of(name, params, grads, weight_decay=0.0):
    optimizer = make_optimizer(name, constant, weight_decay, 1.0)
    return jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0]


def test_muon_takes_kernels_and_nothing_that_only_looks_like_a_matrix():
    labels = muon_labels(drafter_like())
    layer = labels["backbone"]["layers"][0]
    assert labels["backbone"]["fc"]["kernel"] == layer["q_proj"]["kernel"] == "muon"
    assert labels["markov_head"]["gate_proj"] == {"kernel": "muon", "bias": "adamw"}
    for other in (layer["q_norm"], labels["backbone"]["norm"], labels["confidence_head"]["proj"]):
        assert set(other.values()) == {"adamw"}
    assert labels["markov_head"]["markov_w1"] == "adamw"


def test_muon_orthogonalises_each_layer_by_itself_and_leaves_the_rest_to_adamw():
    params = drafter_like()
    grads = jax.tree.map(lambda a: 1e-3 * jax.random.normal(jax.random.key(9), a.shape), params)
    stacked = grads["backbone"]["layers"][0]["q_proj"]["kernel"]
    grads["backbone"]["layers"][0]["q_proj"]["kernel"] = stacked * jnp.array([1, 1000, 0.001])[:, None, None]
    ours, adamw = (update_of(name, params, grads) for name in ("muon", "adamw"))
    for layer in np.asarray(ours["backbone"]["layers"][0]["q_proj"]["kernel"]):
        singular = np.linalg.svd(layer, compute_uv=False) / (0.01 * MUON_RMS * np.sqrt(12))
        assert (singular > 0.5).all() and (singular < 1.3).all()  # Newton-Schulz is a rough inverse root
    labels = jax.tree.leaves(muon_labels(params))
    for label, mine, theirs in zip(labels, jax.tree.leaves(ours), jax.tree.leaves(adamw), strict=True):
        assert label == "muon" or (np.asarray(mine) == np.asarray(theirs)).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns_and_decays_weights_by_the_learning_rate(name):
    params = drafter_like()
    still = update_of(name, params, jax.tree.map(jnp.zeros_like, params), weight_decay=0.1)
    for update, leaf in zip(jax.tree.leaves(still), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, -0.01 * 0.1 * leaf, atol=1e-7)
    goal = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(8), a.shape), params)
    loss = lambda p: sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (p, goal)), strict=True))  # noqa: E731
    optimizer = make_optimizer(name, constant, 0.0, 1.0)
    start, state = float(loss(params)), optimizer.init(params)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(15):
        params, state = step(params, state)
    assert float(loss(params)) < 0.5 * start
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_float64_stays_float64(x64):
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), drafter_like())
    for name in NAMES:
        updates = jax.eval_shape(functools.partial(update_of, name), params, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float64")}


def test_the_average_forgets_its_beginning_and_then_has_the_decay_asked_for():
    mean, want = {"a": jnp.zeros(2)}, np.zeros(2)
    for step in range(40):
        new = np.array([step, 1.0], np.float32)
        decay = min(0.8, (1 + step) / (10 + step))
        want = decay * want + (1 - decay) * new
        mean = averaged(mean, {"a": new}, 0.8, jnp.int32(step))
    assert np.asarray(mean["a"]) == pytest.approx(want, rel=1e-5)
    assert want[1] > 0.999 and 34 < want[0] < 36  # about five steps behind
    assert averaged(None, {"a": new}, 0.0, jnp.int32(1)) is None


def test_an_unknown_optimizer_is_named():
    with pytest.raises(UserError, match="unknown train.optimizer 'sgd': it is adamw, muon or adafactor"):
        make_optimizer("sgd", constant, 0.0, 1.0)

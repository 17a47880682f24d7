"""Eagle3's training-time test: numbers of the reference implementation (spec 5.3), and the loss by its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from safetensors.numpy import load_file

from dspark_jax.data.batches import Batch
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.config import Attention, DecoderConfig, Eagle3Config, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.training.eagle3 import Eagle3Loss, eagle3_loss, position_masks, training_time_test
from dspark_jax.training.features import Features
from dspark_jax.training.step import Setup, TrainState
from dspark_jax.training.update import train_step

# ------------------------------------------------------------------------------------------------- the golden arrays

STEPS = 5


@pytest.fixture(scope="module")
def case(golden):
    target = load_target(golden / "target", dtype="float32")
    arrays = load_file(golden / "eagle3_train.safetensors")
    batch = Batch(arrays["input_ids"], arrays["loss_mask"], np.array([64, 64]), np.arange(2))
    return load_drafter(golden / "eagle3", target), arrays, batch


def draft_logits(module, steps):
    """logits(params, borrowed, taps, batch) of every step."""

    def logits(params, borrowed, taps, batch):
        token, length = batch.token_BxS, batch.length_B
        return training_time_test(module, params, borrowed, taps, token, length, steps, lambda t, logits: logits)

    return jax.jit(logits)


def close(got, expected, tolerance=1e-5):
    """Within `tolerance` of the largest expected value."""
    return np.abs(np.asarray(got) - expected).max() <= tolerance * np.abs(expected).max()


def test_masks_are_exactly_the_references(case):
    _, arrays, batch = case
    masks = position_masks(batch.loss_mask_BxS, batch.length_B, STEPS)
    for t in range(STEPS):
        assert (np.asarray(masks[t]) == (arrays[f"position_mask.{t}"][..., 0] > 0)).all()


def test_draft_logits_of_every_step(case):
    drafter, arrays, batch = case
    logits = draft_logits(drafter.module, STEPS)(drafter.params, drafter.borrowed, arrays["taps"], batch)
    for t in range(STEPS):
        # The last t rows have left the sequence: they see nothing, and no loss reads them.
        assert close(logits[t][:, : 64 - t], arrays[f"draft_logits.{t}"][:, : 64 - t])


def test_the_loss_of_every_step(case):
    drafter, arrays, batch = case
    hidden = jnp.asarray(arrays["last_hidden"])
    log_total = jax.nn.logsumexp(hidden @ drafter.borrowed.head_VdxH.T, axis=-1)
    features = Features(jnp.asarray(arrays["taps"]), hidden, log_total)
    loss = jax.jit(eagle3_loss, static_argnums=(0, 1))
    value, sums = loss(drafter.module, Eagle3Loss(STEPS, 0.8), drafter.params, drafter.borrowed, features, batch)
    assert close(sums["step_loss"][0], np.concatenate([arrays[f"step_loss.{t}"] for t in range(STEPS)]))
    assert close(value, arrays["loss"][0])


# ------------------------------------------------------------------------------------------- by the loss's definition

BATCH, LENGTH, VOCAB, HIDDEN, TAPS = 2, 12, 13, 8, 3
SETTINGS = Eagle3Loss(3, 0.7)
SPOKEN = np.array([0, 2, 3, 7, 12])


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A random drafter and a batch whose second sequence is padded and masked in its middle."""

    module: Eagle3
    params: dict
    borrowed: Borrowed
    features: Features
    batch: Batch
    target_BxSxV: np.ndarray  # the target's probabilities


def tiny(spoken=None, dtype="float64", softcap=2.0) -> Tiny:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    attention = Attention(num_kv_heads=1, head_dim=4, rope=Rope(100.0))
    decoder = DecoderConfig("qwen3", VOCAB, HIDDEN, 8, 2, (attention,), (0,), qk_norm=True, softcap=softcap, tied=False)
    ids = np.arange(VOCAB) if spoken is None else spoken
    module = Eagle3(Eagle3Config(decoder, SETTINGS.steps, tuple(range(TAPS)), 4, len(ids)))
    head, hidden = draw(VOCAB, HIDDEN), draw(BATCH, LENGTH, HIDDEN)
    borrowed = Borrowed(draw(VOCAB, HIDDEN), head[ids], jnp.asarray(ids))
    zeros = jnp.zeros(1, jnp.int32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), draw(1, TAPS * HIDDEN), zeros, borrowed)["params"])
    params = jax.tree.map(lambda a: draw(*a.shape) / np.sqrt(a.shape[-2] if a.ndim > 1 else 1), shapes)
    logits = softcap * jnp.tanh(hidden @ head.T / softcap)
    features = Features(draw(BATCH, LENGTH, TAPS * HIDDEN), hidden, jax.nn.logsumexp(logits, axis=-1))
    length = np.array([LENGTH, 9])
    mask = (np.arange(LENGTH) >= [[2], [1]]) & (np.arange(LENGTH) < length[:, None])
    mask[1, 4] = False
    token = rng.integers(0, VOCAB, (BATCH, LENGTH)) * (np.arange(LENGTH) < length[:, None])
    batch = Batch(token.astype(np.int32), mask.astype(np.float32), length, np.arange(BATCH))
    return Tiny(module, params, borrowed, features, batch, np.asarray(jax.nn.softmax(logits, axis=-1)))


@pytest.fixture(scope="module", params=[None, SPOKEN], ids=["full", "reduced"])
def problem(request):
    """A float64 case, the target ids its drafter speaks, and the loss with metrics and gradients as one program."""
    with jax.enable_x64(True):
        case = tiny(request.param)
        loss = functools.partial(eagle3_loss, case.module, SETTINGS)
        return (
            case,
            np.arange(VOCAB) if request.param is None else SPOKEN,
            jax.jit(jax.value_and_grad(loss, has_aux=True)),
        )


def by_definition(case: Tiny, spoken: np.ndarray) -> dict[str, np.ndarray]:
    """Loss and metrics in loops over sequences, rows and steps, from the draft logits and the target's distribution."""
    batch, taps = case.batch, case.features.taps_BxSxMH
    logits = jax.device_get(draft_logits(case.module, SETTINGS.steps)(case.params, case.borrowed, taps, batch))
    loss, count, agreed, accepted = (np.zeros(SETTINGS.steps) for _ in range(4))
    expected, greedy, rows = 0.0, 0.0, 0
    for b, last in enumerate(batch.length_B - 1):
        for i in range(LENGTH):
            alive, chance = True, 1.0
            for t in range(SETTINGS.steps):
                if i + t >= last or not batch.loss_mask_BxS[b, i + t]:
                    alive, chance = False, 0.0
                    continue
                p, log_q = case.target_BxSxV[b, i + 1 + t], scipy.special.log_softmax(logits[t][b, i])
                q = np.zeros(VOCAB)
                q[spoken] = np.exp(log_q)
                loss[t] -= p[spoken] @ log_q
                count[t] += 1
                agreed[t] += np.argmax(p[spoken]) == np.argmax(log_q)
                accepted[t] += np.minimum(p, q).sum()
                alive, chance = alive and np.argmax(p[spoken]) == np.argmax(log_q), chance * np.minimum(p, q).sum()
                if batch.loss_mask_BxS[b, i]:
                    greedy, expected = greedy + alive, expected + chance
            rows += bool(i < last and batch.loss_mask_BxS[b, i])
    loss /= BATCH * LENGTH
    rates = {"accuracy": agreed / count, "accept_rate": accepted / count, "step_loss": loss}
    taus = {"tau_greedy": 1 + greedy / rows, "tau_probabilistic": 1 + expected / rows}
    return rates | taus | {"loss": loss @ SETTINGS.step_decay ** np.arange(SETTINGS.steps)}


def test_loss_and_metrics(x64, problem):
    case, spoken, loss = problem
    (value, sums), _ = loss(case.params, case.borrowed, case.features, case.batch)
    expected = by_definition(case, spoken)
    np.testing.assert_allclose(value, expected.pop("loss"), rtol=1e-12)
    assert expected.keys() == sums.keys()
    for name, (numerator, denominator) in sums.items():
        np.testing.assert_allclose(numerator / denominator, expected[name], rtol=1e-12, err_msg=name)


def test_padding_changes_nothing(x64, problem):
    case, _, loss = problem
    padding = np.arange(LENGTH) >= case.batch.length_B[:, None]
    batch = dataclasses.replace(case.batch, token_BxS=np.where(padding, 5, case.batch.token_BxS))
    features = jax.tree.map(
        lambda a: jnp.where(padding.reshape(*padding.shape, *[1] * (a.ndim - 2)), 3, a), case.features
    )
    expected = loss(case.params, case.borrowed, case.features, case.batch)
    jax.tree.map(np.testing.assert_array_equal, loss(case.params, case.borrowed, features, batch), expected)


def test_gradients_are_slopes(x64, problem):
    """Through the recurrent state and the cached rows of every step, against central differences.

    The golden file's gradients hold those of another batch too: fc's leave the span of this batch's taps.
    """
    case, _, loss = problem
    rest = (case.borrowed, case.features, case.batch)
    leaves, treedef = jax.tree.flatten(case.params)
    grads = jax.tree.leaves(loss(case.params, *rest)[1])
    rng = np.random.default_rng(1)
    for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        direction = rng.standard_normal(leaf.shape)
        moved = [treedef.unflatten([*leaves[:i], leaf + step * direction, *leaves[i + 1 :]]) for step in (1e-5, -1e-5)]
        above, below = (loss(params, *rest)[0][0] for params in moved)
        np.testing.assert_allclose(np.sum(grad * direction), (above - below) / 2e-5, rtol=1e-6, atol=1e-9)


def test_bfloat16_has_float32_losses(x64, problem):
    case, _, loss = problem
    low = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    borrowed = Borrowed(low(case.borrowed.embedding_VxH), low(case.borrowed.head_VdxH), case.borrowed.token_ids_Vd)
    features = case.features.astype(jnp.bfloat16)
    features = features.replace(log_total_BxS=features.log_total_BxS.astype(jnp.float32))
    (value, sums), _ = loss(low(case.params), borrowed, features, case.batch)
    (expected, _), _ = loss(case.params, case.borrowed, case.features, case.batch)
    assert value.dtype == sums["accept_rate"][0].dtype == sums["tau_probabilistic"][0].dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=0.03)


def test_train_step():
    """The dispatch on the drafter's type; the loss falls."""
    case = tiny(SPOKEN, "float32")
    setup = Setup(case.module, SETTINGS, num_anchors=4, optimizer=optax.adam(3e-3))
    state = TrainState(case.params, setup.optimizer.init(case.params), jnp.zeros((), jnp.int32))
    losses = []
    for _ in range(8):
        state, metrics = train_step(setup, case.borrowed, state, lambda _: case.features, [case.batch])
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and int(state.step) == 8
    assert int(metrics["blocks"]) == int(metrics["sums"]["tau_greedy"][1]) > 0

"""Which positions get a draft block, and what its slots should predict (spec 1.7)."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Blocks:
    """N draft blocks of K slots in each of B packs (or sequences). Slot k predicts the token at anchor + 1 + k."""

    anchor_BxN: jax.Array  # tokens of the pack, increasing; 0 in dummy blocks
    position_BxN: jax.Array  # the anchors' positions in their documents, whose first tokens are anchor - position
    keep_BxN: jax.Array  # False: a dummy that fills the static shape
    label_BxNxK: jax.Array  # token ids to predict
    source_BxNxK: jax.Array  # position whose target distribution is the slot's: the one before the label
    eval_BxNxK: jax.Array  # True up to the first slot whose label is padding or not to be learnt
    previous_BxNxK: jax.Array  # the token before each label: the anchor, then the labels (teacher forcing)


def sample_anchors(key: jax.Array, loss_mask_BxS: jax.Array, num_anchors: int) -> tuple[jax.Array, jax.Array]:
    """Up to `num_anchors` positions a sequence, uniform without replacement, where it and the next are to be learnt.

    Returns positions `[B, N]` in increasing order, the dummies last at 0, and which are kept.
    """
    wanted = loss_mask_BxS > 0.5
    candidate = (wanted[:, :-1] & wanted[:, 1:]) if wanted.shape[1] > 1 else jnp.zeros_like(wanted)
    count = candidate.shape[1]
    order = jnp.where(candidate, jax.random.uniform(key, candidate.shape), 2.0)
    chosen = jnp.argsort(order, axis=1)[:, :num_anchors]
    chosen = jnp.pad(chosen, ((0, 0), (0, max(num_anchors - count, 0))))
    keep = jnp.arange(num_anchors) < jnp.minimum(jnp.sum(candidate, axis=1), num_anchors)[:, None]
    anchors = jnp.sort(jnp.where(keep, chosen, count), axis=1)
    return jnp.where(keep, anchors, 0), keep


def make_blocks(
    token_BxS: jax.Array,
    loss_mask_BxS: jax.Array,
    anchor_BxN: jax.Array,
    keep_BxN: jax.Array,
    block_size: int,
    position_BxS: jax.Array | None = None,
) -> Blocks:
    """Labels, their masks and the teacher-forced previous tokens of the blocks at given anchors.

    `position_BxS`: of the tokens in their documents; None: each row is one. What lies behind the end of a block's
    document is not learnt.
    """
    length = token_BxS.shape[1]
    if position_BxS is None:
        position_BxS = jnp.broadcast_to(jnp.arange(length), token_BxS.shape)
    index = anchor_BxN[..., None] + 1 + jnp.arange(block_size)
    safe = jnp.where(keep_BxN[..., None], jnp.minimum(index, length - 1), 0)

    def at(values_BxS: jax.Array, position: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values_BxS, position.reshape(position.shape[0], -1), axis=1).reshape(position.shape)

    label, position_BxN = at(token_BxS, safe), at(position_BxS, anchor_BxN)
    same_document = safe - at(position_BxS, safe) == (anchor_BxN - position_BxN)[..., None]
    learnt = (index < length) & same_document & (at(loss_mask_BxS, safe) > 0.5) & keep_BxN[..., None]
    previous = jnp.concatenate([at(token_BxS, anchor_BxN)[..., None], label[..., :-1]], axis=-1)
    source, alive = jnp.maximum(safe - 1, 0), jnp.cumprod(learnt, axis=-1).astype(bool)
    return Blocks(anchor_BxN, position_BxN, keep_BxN, label, source, alive, previous)

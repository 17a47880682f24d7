"""The tables of a drafter: embedding, head, and which target id each row of the head stands for."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.interop.families import take_tensor
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.models.drafter import Borrowed


def borrow(target: Target, token_ids: np.ndarray | None = None) -> Borrowed:
    """The target's embedding and the head's rows for `token_ids` (None: the whole vocabulary)."""
    ids = np.arange(target.config.vocab_size) if token_ids is None else token_ids
    return Borrowed(target.params["embedding"], _target_head(target, token_ids), jnp.asarray(ids, jnp.int32))


def _target_head(target: Target, token_ids: np.ndarray | None) -> jax.Array:
    head = target.params["embedding"] if target.config.tied else target.params["lm_head"]["kernel"].T
    return head if token_ids is None else head[jnp.asarray(token_ids)]


def read_tables(
    tensors: Mapping[str, Any], config: DrafterConfig | Eagle3Config, target: Target, own_head: bool
) -> Borrowed:
    """Embedding, head and draft ids: from the file where it has them, else from the target.

    A drafter of another width than the target's needs both tables in its file; a reduced one its head (`own_head`).
    """
    vocab, hidden, spoken = config.decoder.vocab_size, config.decoder.hidden_size, config.draft_vocab_size
    ids, foreign = draft_ids(tensors, spoken, vocab), hidden != target.config.hidden_size

    def table(name: str, rows: int) -> jax.Array:
        return jnp.asarray(take_tensor(tensors, name, (rows, hidden), target.dtype))

    keeps_head = "lm_head.weight" in tensors or foreign or (config.reduced and own_head)
    head = table("lm_head.weight", spoken) if keeps_head else _target_head(target, ids)
    keeps_embedding = "embed_tokens.weight" in tensors or foreign
    embedding = table("embed_tokens.weight", vocab) if keeps_embedding else target.params["embedding"]
    if "mask_embedding" in tensors:  # stands in for the mask token's row (checkpoint formats 8.1)
        row = take_tensor(tensors, "mask_embedding", (hidden,), target.dtype)
        embedding = embedding.at[config.mask_token_id].set(row)
    return Borrowed(embedding, head, jnp.asarray(np.arange(vocab) if ids is None else ids, jnp.int32))


def draft_ids(tensors: Mapping[str, Any], spoken: int, vocab: int) -> np.ndarray | None:
    """The target ids `[Vd]` of a reduced vocabulary, increasing; None for a whole one (checkpoint formats 0.4).

    `d2t` holds offsets by convention (target id - draft id) and target ids in some files; `t2d`, a mask of the
    target's vocabulary, tells which. Without it the offsets are believed unless they fit nothing.
    """
    rows = np.arange(spoken)
    if spoken == vocab and "d2t" not in tensors:
        return None
    stored = take_tensor(tensors, "d2t", (spoken,), np.int64)
    fits = [ids for ids in (stored + rows, stored) if _increasing(ids, vocab)]
    if "t2d" in tensors:
        spoken_V = take_tensor(tensors, "t2d", (vocab,), np.bool_)
        fits = [ids for ids in fits if np.array_equal(ids, np.flatnonzero(spoken_V))]
    if not fits:
        told = " that t2d confirms" if "t2d" in tensors else ""
        raise UserError(
            f"d2t is no increasing map into the target's vocabulary{told}, "
            "read as offsets (target id - draft id) or as target ids"
        )
    return None if spoken == vocab else fits[0]


def _increasing(ids: np.ndarray, vocab: int) -> bool:
    return bool(ids[0] >= 0 and ids[-1] < vocab and (np.diff(ids) > 0).all())

"""The drafter that a run starts from: a new one, or one that was trained before."""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from dspark_jax.data.batches import draft_vocabulary
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter, load_drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.training.validation import Rows

Sizes = DrafterConfig | Eagle3Config


def trained_before(config: ConfigDict, sizes: Sizes, lender: Target) -> Drafter | None:
    """The drafter of `drafter.init_from`, whole on this process, with its reduced vocabulary; None where none is named.

    It borrows the tables of `lender`. UserError where it is not there, or not of the config's sizes.
    """
    source = config.drafter.init_from
    if not source:
        return None
    found = load_drafter(source, lender)
    differs = _differences(found.config, sizes)
    if differs:
        raise UserError(f"drafter.init_from={source} has other sizes than the config's drafter: {differs}")
    params = jax.tree.map(lambda a: a.astype(jnp.float32), found.params)
    return Drafter(sizes, params, borrow(lender, found.borrowed.token_ids_Vd if sizes.reduced else None))


def new_drafter(config: ConfigDict, sizes: Sizes, lender: Target, rows: Rows) -> Drafter:
    """An untrained drafter; a reduced vocabulary has the most frequent tokens of `rows`."""
    ids = None
    if sizes.reduced:
        ids = draft_vocabulary(rows, sizes.draft_vocab_size, lender.config.eos_token_ids, lender.config.vocab_size)
    return Drafter(sizes, init_drafter(sizes, jax.random.key(config.seed)), borrow(lender, ids))


def _differences(found: object, sizes: Sizes) -> str:
    """The settings that differ, by name; "" where weights of one fit the other. Anchors are of training alone."""
    if type(found) is not type(sizes):
        return f"it is a {type(found).__name__}, not a {type(sizes).__name__}"
    names = [field.name for field in dataclasses.fields(sizes) if field.name != "num_anchors"]
    pairs = {name: (getattr(found, name), getattr(sizes, name)) for name in names}
    return ", ".join(f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in pairs.items() if theirs != ours)

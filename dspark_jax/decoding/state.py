"""What a round works on: networks, weights, caches and slots, and what it hands to the host."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.adjust import Adjust
from dspark_jax.decoding.caches import Pools
from dspark_jax.decoding.sampling import SlotSampling
from dspark_jax.decoding.schedule import SlotSchedule
from dspark_jax.decoding.sink import RowFeatures
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.few_rows import FEW
from dspark_jax.models.layers import Params
from dspark_jax.models.lookup import Lookup
from dspark_jax.models.target import Decoder


@dataclasses.dataclass(frozen=True)
class Models:
    """The networks of a round, without their weights (static). `drafter` None: plain decoding.

    `num_tokens`: ids from it on are padding of the vocabulary and never come out. `sink_taps`: which of the target's
    taps go out with every accepted row (None: no features do); the drafter's own come first.
    """

    target: Decoder
    drafter: DSpark | Eagle3 | Lookup | None
    num_tokens: int
    sink_taps: tuple[int, ...] | None = None
    attention: str = "auto"  # backend of `ragged_attention`

    @property
    def reads_history(self) -> bool:
        """True when the drafter reads the slots' tokens."""
        return isinstance(self.drafter, Lookup)

    @property
    def drafts_by_network(self) -> bool:
        """True when the drafter has weights, and keys and values of its own."""
        return isinstance(self.drafter, DSpark | Eagle3)


@flax.struct.dataclass
class Weights:
    """The weights of a round, never changed by it."""

    target: Params
    drafter: Params = None
    borrowed: Borrowed | None = None
    target_by_row: Params = None  # the target's again, for few rows on a CPU

    def target_for(self, num_rows: int) -> Params:
        """The target's weights as `num_rows` rows are multiplied fastest."""
        return self.target if self.target_by_row is None or num_rows > FEW else self.target_by_row


@flax.struct.dataclass
class Caches:
    """Target keys and values, and the drafter's keys and values of the same positions (its context)."""

    target: Pools
    draft: Pools | None


@flax.struct.dataclass
class Slots:
    """Every slot's request. The cache holds its tokens but the last one, the anchor, which the next round runs."""

    anchor_R: jax.Array  # last committed token
    length_R: jax.Array  # committed tokens, prompt and anchor included; the anchor stands at length - 1
    remaining_R: jax.Array  # tokens that may still be emitted; 0 when the request has ended
    table_RxC: jax.Array  # its pages
    carry: Any  # what its drafter keeps of the row before the anchor, `[R, ...]`
    sampling: SlotSampling
    adjust: Adjust | tuple[()] = ()  # of the logits; `()` while no running request asks for any
    schedule: SlotSchedule | tuple[()] = ()  # `()` without a scheduler
    history_RxT: jax.Array | tuple[()] = ()  # its tokens, where they are what the drafter reads


@flax.struct.dataclass
class Logprobs:
    """Of emitted tokens under the model's own distribution, and of the likeliest tokens in their place."""

    token_RxQ: jax.Array
    top_id_RxQxT: jax.Array
    top_RxQxT: jax.Array


@flax.struct.dataclass
class Emitted:
    """What a dispatch of D rounds produced, for the host."""

    token_DxRxQ: jax.Array
    count_DxR: jax.Array  # emitted tokens; 0 once a request has ended
    verified_DxR: jax.Array  # drafts that were verified
    accepted_DxR: jax.Array  # drafts that were accepted and emitted
    rows_D: jax.Array  # rows of the target's step, padding included; 0: the round was not needed
    confidence_DxRxK: jax.Array  # the drafter's logits, before any calibration
    remaining_R: jax.Array  # after the dispatch
    logprobs: Logprobs | tuple[()]  # `[D, ...]`; `()` when nobody asked
    features: RowFeatures | tuple[()]  # `[D, R, Q, ...]` of the anchor and the drafts; `()` without a sink


@jax.jit
def permute(slots: Slots, order: jax.Array, kept: jax.Array) -> Slots:
    """Slots in another order, of which only the first `kept` go on."""
    slots = jax.tree.map(lambda a: a[order], slots)
    return slots.replace(remaining_R=jnp.where(jnp.arange(len(order)) < kept, slots.remaining_R, 0))


@jax.jit
def set_slot(slots: Slots, index: jax.Array, entries: Slots) -> Slots:
    """Slots with one slot's entries in place of what it held."""
    return jax.tree.map(lambda all_, one: all_.at[index].set(one), slots, entries)

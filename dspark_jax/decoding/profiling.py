"""What rounds cost on the devices at hand: the serving programs themselves, timed at every size (paper section 4)."""

import dataclasses
import functools
import hashlib
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.state import Slots
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.parallel import describe_mesh, everywhere, on
from dspark_jax.scheduling.cost_model import CostTable, Stamp, profile
from dspark_jax.scheduling.scheduler import RoundCost, Strategy

if TYPE_CHECKING:
    from dspark_jax.decoding.engine import Engine

PASSES = 7
LEAST_CONTEXT = 64  # tokens


def stamp_of(target: Target, drafter: Drafter) -> Stamp:
    """Where a table measured with these models on these devices holds."""
    device = jax.devices()[0]
    return Stamp(
        device=device.device_kind,
        devices=target.mesh.size if target.mesh else 1,
        mesh=describe_mesh(target.mesh),
        model=target.name,
        fingerprint=target.fingerprint,
        drafter=drafter_fingerprint(drafter),
        dtype=str(target.dtype),
        jax=jax.__version__,
    )


def drafter_fingerprint(drafter: Drafter) -> str:
    """16 hex digits of a drafter's sizes and of some weights in bfloat16; of its settings where it has no weights."""
    sizes = jax.tree.map(jnp.shape, drafter.params) or drafter.config
    digest = hashlib.sha256(repr(sizes).encode())
    for array in jax.tree.leaves(drafter.params):
        digest.update(np.asarray(array.ravel()[:64].astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def measure_costs(engine: "Engine", drafter: Drafter, passes: int = PASSES) -> CostTable:
    """The cost table of an idle engine with a drafter, for every number of slots and context that it serves.

    Overwrites what the engine's pages hold.
    """
    slots = [1 << i for i in range((engine.max_slots - 1).bit_length())] + [engine.max_slots]
    widest = engine.context_pages(engine.context) * engine.page_size
    contexts = [widest] + [c for c in (LEAST_CONTEXT << (2 * i) for i in range(16)) if c < widest]
    engine.pages.forget()
    stamp = stamp_of(engine.target, drafter)
    return profile(stamp, slots, sorted(contexts), engine.drafts, _Timer(engine), passes)


class _Timer:
    """Times rounds of an engine, a dispatch of them at a time."""

    def __init__(self, engine: "Engine"):
        self.engine, self.warm = engine, set()
        self.policy = dataclasses.replace(engine.policy, strategy=Strategy("load_aware"))
        self.slots = functools.cache(self._slots)

    def __call__(self, rows: int, active: int, context: int) -> float:
        """Seconds of a round that verifies `rows` rows; of one without drafting for 0 rows. Compiled beforehand."""
        shape = (bool(rows), active, context)
        if shape not in self.warm:
            self.warm.add(shape)
            self._round(rows, active, context)
        return self._round(rows, active, context)

    def _round(self, rows: int, active: int, context: int) -> float:
        engine = self.engine
        slots = jax.block_until_ready(jax.tree.map(jnp.copy, self.slots(context)))  # a dispatch consumes its slots
        start = time.perf_counter()
        with on(engine.target.mesh):
            engine.caches, _, emitted = decode(
                engine.models, self.policy, engine.weights, engine.caches, slots, self._cost(rows, active),
                active=active, drafts=engine.drafts if rows else 0, context_pages=context // engine.page_size,
                rounds=engine.rounds,
            )  # fmt: skip
        jax.block_until_ready(emitted)
        return (time.perf_counter() - start) / engine.rounds

    def _cost(self, rows: int, active: int) -> RoundCost | None:
        """Costs by which a round verifies just `rows` rows: what fits is free, more is out of the question."""
        if not rows:
            return None
        rows_J = np.asarray(self.policy.buckets(active, self.engine.drafts), np.int32)
        return RoundCost(rows_J, np.where(rows_J <= rows, 1e-6, 1e6).astype(np.float32), np.float32(1e-6))

    def _slots(self, context: int) -> Slots:
        """Requests that go on for ever behind a full context; their confidences are level, so all can be admitted."""
        engine = self.engine
        slots, count = engine.empty_slots(), engine.max_slots
        length = max(context - engine.rounds * (engine.drafts + 1), 1)
        one = engine.slot_sampling(SamplingParams(temperature=0.0), 0, ())
        table = np.arange(slots.table_RxC.size).reshape(slots.table_RxC.shape) % engine.pages.total
        repeat = lambda a: jnp.repeat(jnp.asarray(a)[None], count, axis=0)  # noqa: E731
        slots = slots.replace(
            length_R=jnp.full(count, length, jnp.int32),
            remaining_R=jnp.full(count, 1 << 30, jnp.int32),
            table_RxC=jnp.asarray(table, jnp.int32),
            sampling=jax.tree.map(repeat, one),
            schedule=jax.tree.map(lambda a: jnp.full_like(a, 1e9), slots.schedule),
        )
        return everywhere(slots, engine.target.mesh)

"""The plan of a serving round: the engine's own decode program, all slots in use."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dspark_jax.data.conversations import PromptRow
from dspark_jax.decoding.admission import STOP_WIDTH
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SlotSampling
from dspark_jax.decoding.state import Caches, Slots, Weights
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.planning.chips import Machine
from dspark_jax.planning.models import (
    AnyMesh,
    abstract_models,
    bytes_of,
    place_params,
    place_pools,
    place_tables,
    replicated,
    served_drafter,
)
from dspark_jax.planning.program import examine
from dspark_jax.planning.report import Plan
from dspark_jax.serving import make_engine, sampling_params


def plan_serving(
    config: ConfigDict, machine: Machine, context: int, tokens_per_round: float, kernels: str = ""
) -> Plan:
    """A round of `serve.max_slots` requests with `context` tokens behind each; it verifies whole blocks.

    `tokens_per_round`: what a request is assumed to gain by one, bonus included; at most what a block can give.
    `kernels`: "tpu" or "xla"; "": on one TPU the kernels, on several XLA's operations, whose products can be counted.
    UserError where the config's engine does not hold so many tokens.
    """
    target, own = abstract_models(config)
    drafter = served_drafter(config, target, own)
    mesh = machine.mesh(config.mesh, max(kind.num_kv_heads for kind in target.config.attention))
    engine, caches, slots = abstract_engine(config, target, drafter, mesh, kernels)
    rows = engine.pages.total * engine.page_size
    if context > min(engine.context, rows // engine.max_slots):
        raise UserError(
            f"--context={context}: the engine of this config holds {rows} tokens in all, {engine.context} of a "
            f"request, and has serve.max_slots={engine.max_slots}: lower one of them"
        )
    weights = _placed_weights(engine, drafter, mesh)
    caches = Caches(place_pools(caches.target, mesh), place_pools(caches.draft, mesh))
    slots = replicated(slots, mesh)
    parts = _parts(engine, target, weights, caches, slots)
    machine = machine.holding(sum(parts.values()))
    program = examine(
        machine, mesh, decode, engine.models, engine.policy, weights, caches, slots, None, active=engine.max_slots,
        drafts=engine.drafts, context_pages=engine.context_pages(context), rounds=engine.rounds,
    )  # fmt: skip
    gained = min(tokens_per_round, engine.drafts + 1)
    setting = f"{engine.max_slots} requests, {context} tokens behind each, {engine.drafts} drafts"
    plan = Plan.of("serving round", setting, machine, mesh, parts, [(1, program)])
    unit = f"tokens/s at {gained:g} tokens per round"
    return plan.with_rate(unit, engine.max_slots * gained).with_advice(_advice(plan, machine))


def abstract_engine(
    config: ConfigDict, target: Target, drafter: Drafter | None, mesh: AnyMesh, kernels: str
) -> tuple[Engine, Caches, Slots]:
    """The config's engine without arrays, and the shapes of its caches and of slots with the config's sampling.

    It verifies what a constant strategy says: those that weigh costs need a table of the machine, and run the same
    programs at most.
    """
    s, made = config.serve, []
    strategy = s.strategy if s.strategy.split(":")[0] in ("off", "fixed", "threshold") else "auto"
    kernels = kernels or ("tpu" if mesh.size == 1 and isinstance(mesh, Mesh) else "auto")

    def build() -> tuple[Caches, Slots]:
        engine = make_engine(config, target, drafter, cost_table=None, strategy=strategy, kernels=kernels)
        made.append(engine)
        params = sampling_params(config, PromptRow("plan", []))
        one = SlotSampling.of(params, 0, (), STOP_WIDTH, sampled=params.sampled, limited=params.limited)
        all_slots = jax.tree.map(lambda a: jnp.asarray(np.repeat(np.asarray(a)[None], engine.max_slots, axis=0)), one)
        return engine.caches, engine.slots.replace(sampling=all_slots)

    caches, slots = jax.eval_shape(build)
    return made[0], caches, slots


def _placed_weights(engine: Engine, drafter: Drafter | None, mesh: AnyMesh) -> Weights:
    target = place_params(engine.weights.target, engine.target.config, mesh)
    if not engine.models.drafts_by_network:
        return Weights(target)
    params = place_params(drafter.params, drafter.config.decoder, mesh)
    return Weights(target, params, place_tables(drafter.borrowed, mesh, drafter.config.reduced))


def _parts(engine: Engine, target: Target, weights: Weights, caches: Caches, slots: Slots) -> dict[str, int]:
    """Bytes on a device. The drafter's embedding is the target's own array, and so is its head where that is tied."""
    parts = {"target weights": bytes_of(weights.target)}
    if weights.borrowed is not None:
        own_head = not target.config.tied or engine.models.drafter.config.reduced
        parts["drafter weights"] = bytes_of(weights.drafter)
        parts["drafter's copy of the head"] = bytes_of(weights.borrowed.head_VdxH) if own_head else 0
        parts["page pool of the drafter"] = bytes_of(caches.draft)
    rows = engine.pages.total * engine.page_size
    parts[f"page pool of the target, {rows} tokens"] = bytes_of(caches.target)
    return parts | {"slots": bytes_of(slots)}


def _advice(plan: Plan, machine: Machine) -> str:
    """What to lower where it does not fit."""
    weights = sum(size for name, size in plan.parts.items() if "weights" in name)
    if weights > machine.chip.memory:
        return "the weights alone do not fit: more devices that share them (--topology, config.mesh)"
    return "lower serve.max_slots, or take more devices"

"""What `bench` measures: steps, rounds and answers of a config's models."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Completion, Prompt
from dspark_jax.decoding.round import decode, draft, prefill, target_rows
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import Policy
from dspark_jax.decoding.state import Caches, Models, Slots, Weights
from dspark_jax.demo import demo_prompts
from dspark_jax.errors import UserError
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.evaluation.report import environment
from dspark_jax.evaluation.timing import Clock, CpuUse, seconds
from dspark_jax.evaluation.transformers_step import TransformersStep, load_transformers
from dspark_jax.interop.checkpoint_files import locate
from dspark_jax.interop.drafter_io import BY_NAME, Drafter, load_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.target import Decoder
from dspark_jax.parallel import on, parse_mesh
from dspark_jax.progress import Progress
from dspark_jax.serving import make_engine
from pallas_kernels.ragged_attention import ragged_rows

BATCHES = (1, 16)
CONTEXT = 128  # tokens of every request whenever a step or a round is timed
ANSWER = 64  # tokens of an end-to-end answer
TOGETHER = (1, 4)  # end to end: prompts that run at a time
END_TO_END_REPEATS = 3
READ_BYTES = 1 << 29  # far more than any CPU's cache


def measure(config: ConfigDict, repeats: int) -> dict[str, Any]:
    """All measurements of a config, under the names of the JSON report. Times are in ms, speeds in tokens/s."""
    target, drafter, skipped = _load(config)
    clock, prompts = Clock(repeats, compiled_programs), random_prompts(max(BATCHES), CONTEXT, target.config.vocab_size)
    theirs, reason = load_transformers(target, usable_threads())
    skipped |= {"transformers": reason} if reason else {}
    batches, together = (BATCHES, TOGETHER) if drafter else ((), ())
    used = CpuUse()
    with Progress("measurements", len(BATCHES) + 1 + len(batches) + len(together)) as progress:
        run = functools.partial(_section, progress)
        step = run(BATCHES, lambda b: plain_step(config, target, theirs, prompts[:b], clock))
        floor = run(("floor",), lambda _: memory_floor(target))["floor"]
        rounds = run(batches, lambda b: one_round(config, target, drafter, prompts[:b], clock))
        answers = run(together, lambda n: end_to_end(config, target, drafter, n, clock))
    floor["step_over_floor"] = {batch: row["ours_ms"] / floor["floor_ms"] for batch, row in step.items()}
    return {
        **environment(), "threads": usable_threads(), "others_cpu_percent": used.others_percent(),
        "target": target.name, "dtype": str(target.dtype), "drafter": drafter.name if drafter else None,
        "strategy": config.serve.strategy, "sampler": config.serve.sampler, "repeats": repeats,
        "context_tokens": CONTEXT, "answer_tokens": ANSWER, "step": step, "floor": floor, "round": rounds,
        "end_to_end": answers, "compilations_after_warm_up": clock.compilations, "skipped": skipped,
    }  # fmt: skip


def _section(progress: Progress, keys: Sequence[Any], measurement: Callable[[Any], dict]) -> dict[str, dict]:
    results = {}
    for key in keys:
        results[str(key)] = measurement(key)
        progress.advance(1)
    return results


def _load(config: ConfigDict) -> tuple[Target, Drafter | None, dict[str, str]]:
    """Target, drafter (None where there is nothing to draft with) and why rounds are skipped then."""
    target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=parse_mesh(config.mesh))
    if not config.serve.drafter or config.serve.strategy == "off":
        return target, None, {"rounds and end to end": "the config drafts nothing (serve.drafter, serve.strategy)"}
    try:
        if config.serve.drafter not in BY_NAME:
            locate(config.serve.drafter)
    except UserError as error:  # it may not have been trained yet; a damaged one does stop the run
        return target, None, {"rounds and end to end": str(error)}
    return target, load_drafter(config.serve.drafter, target), {}


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(vocab_size, size=(count, length)).tolist()


def usable_threads() -> int:
    """CPUs this process may use: the threads that XLA starts."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# ---------------------------------------------------------------------------------------------------- steps, rounds


class FrozenBatch:
    """An engine whose requests stay at CONTEXT tokens: each round starts from the same slots, overwriting the last."""

    def __init__(self, engine: Engine, prompts: list[list[int]]):
        self.engine, self.batch = engine, len(prompts)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=engine.drafts + 1, ignore_eos=True)
        engine.fill(engine.requests(prompts, params))
        self.slots, self.next_tokens = engine.slots, []
        # As many pages as the engine itself would read when it streams, a round per dispatch.
        pages = engine.context_pages(CONTEXT + 2 * (engine.drafts + 1))
        self.shape = {"drafts": engine.drafts, "context_pages": pages}

    def round(self) -> float:
        """Seconds of one round of all requests, as the engine runs it."""
        engine = self.engine
        slots = jax.block_until_ready(jax.tree.map(jnp.copy, self.slots))  # a round consumes its slots

        def call():
            with on(engine.target.mesh):
                engine.caches, _, emitted = decode(
                    engine.models,
                    engine.policy,
                    engine.weights,
                    engine.caches,
                    slots,
                    active=self.batch,
                    rounds=1,
                    **self.shape,
                )
            self.next_tokens = jax.device_get(emitted).token_DxRxQ[0, :, 0].tolist()

        return seconds(call)

    def alone(self, part: Callable[..., Any]) -> float:
        """Seconds of one part of the round, on the same caches and slots."""
        engine = self.engine
        models = (engine.models, engine.policy)
        with on(engine.target.mesh):
            return seconds(lambda: part(*models, engine.weights, engine.caches, self.slots, **self.shape))


@functools.partial(jax.jit, static_argnames=("models", "policy", "drafts", "context_pages"))
def target_forward(
    models: Models, policy: Policy, weights: Weights, caches: Caches, slots: Slots, drafts: int, context_pages: int
) -> tuple[jax.Array, Any]:
    """The target's forward of a round: its rows through decoder and head. Taps are the drafter's need, so left out."""
    plain = dataclasses.replace(models, target=Decoder(models.target.config), drafter=None)
    batch, cached_R = len(slots.anchor_R), slots.length_R - 1
    rows = ragged_rows(jnp.full(batch, drafts + 1), cached_R, batch * (drafts + 1), drafts + 1)
    token_N = slots.anchor_R[rows.slot_N]
    output = target_rows(plain, weights, caches, slots.table_RxC[:, :context_pages], token_N, rows, cached_R)
    params = weights.target_for(len(token_N))
    logits = plain.target.apply({"params": params}, output.hidden_NxH, method=Decoder.logits)
    return logits, output.kv


@functools.partial(jax.jit, static_argnames=("models", "policy", "drafts", "context_pages"))
def drafting(
    models: Models, policy: Policy, weights: Weights, caches: Caches, slots: Slots, drafts: int, context_pages: int
) -> Proposal:
    """The proposal of a round alone."""
    return draft(models, policy, weights, caches, slots, drafts=drafts, context_pages=context_pages)


def compiled_programs() -> int:
    """Programs compiled so far by everything that is timed here."""
    return sum(jitted._cache_size() for jitted in (decode, prefill, target_forward, drafting))


def plain_step(
    config: ConfigDict, target: Target, theirs: Any | None, prompts: list[list[int]], clock: Clock
) -> dict[str, Any]:
    """One token for every prompt without drafting, ours and (where it is there) theirs."""
    frozen = FrozenBatch(make_engine(config, target, None, strategy="off", max_slots=len(prompts)), prompts)
    if theirs is None:
        return clock.in_turn({"ours": frozen.round})["ours"].entries("ours")
    other = TransformersStep(theirs, prompts)
    times = clock.in_turn({"ours": frozen.round, "transformers": other})
    same = sum(a == b for a, b in zip(frozen.next_tokens, other.next_tokens, strict=True))
    return {
        **times["ours"].entries("ours"), **times["transformers"].entries("transformers"),
        "ratio": times["ours"].median / times["transformers"].median, "same_next_tokens": f"{same} of {len(prompts)}",
    }  # fmt: skip


def one_round(
    config: ConfigDict, target: Target, drafter: Drafter, prompts: list[list[int]], clock: Clock
) -> dict[str, Any]:
    """A speculative round, the target's forward over its rows alone, and drafting alone."""
    frozen = FrozenBatch(make_engine(config, target, drafter, max_slots=len(prompts)), prompts)
    calls = {
        "round": frozen.round, "target_forward": lambda: frozen.alone(target_forward),
        "drafting": lambda: frozen.alone(drafting),
    }  # fmt: skip
    times = clock.in_turn(calls)
    rows = {"rows": len(prompts) * (frozen.engine.drafts + 1)}
    entries = [timing.entries(name) for name, timing in times.items()]
    # Drafting is outside for certain; the forward jitted alone can take longer than it does inside the round.
    spent = times["round"].median
    outside = 100 * max(1 - times["target_forward"].median / spent, times["drafting"].median / spent)
    return functools.reduce(dict.__or__, entries, rows) | {"outside_percent": outside}


def memory_floor(target: Target) -> dict[str, Any]:
    """The least time of a step: every weight read once at the measured bandwidth (the best of several reads)."""
    weights = sum(a.nbytes for a in jax.tree.leaves(target.params))
    if not target.config.tied:
        weights -= target.params["embedding"].nbytes  # only a row per token is read of it
    array, largest = jnp.zeros(READ_BYTES // 4, jnp.float32), jax.jit(jnp.max)
    best = min(seconds(lambda: largest(array)) for _ in range(9))
    bandwidth = READ_BYTES / best
    return {"weight_bytes": weights, "read_gb_per_s": bandwidth / 1e9, "floor_ms": weights / bandwidth * 1e3}


def end_to_end(config: ConfigDict, target: Target, drafter: Drafter, together: int, clock: Clock) -> dict[str, Any]:
    """Greedy answers to four prompts, `together` at a time, without drafting and with the config's strategy."""
    engines = {
        "off": make_engine(config, target, None, strategy="off", max_slots=together),
        "drafted": make_engine(config, target, drafter, max_slots=together),
    }
    prompts, params = chat_prompts(target, 4), SamplingParams(temperature=0.0, seed=0, max_tokens=ANSWER)
    answers: dict[str, list[Completion]] = {}

    def generate(name: str) -> float:
        def call():
            answers[name] = engines[name].generate(prompts, params)

        return seconds(call)

    calls = {name: functools.partial(generate, name) for name in engines}
    times = clock.in_turn(calls, END_TO_END_REPEATS, settle=False)
    stats = {name: round_stats(completions) for name, completions in answers.items()}
    speed = {name: stats[name].tokens / timing.median * 1e3 for name, timing in times.items()}
    same = sum(a.token_ids == b.token_ids for a, b in zip(answers["off"], answers["drafted"], strict=True))
    return {
        "off_tokens_per_s": speed["off"], "drafted_tokens_per_s": speed["drafted"],
        "ratio": speed["drafted"] / speed["off"], "tokens_per_round": stats["drafted"].tokens_per_round,
        "same_answers": f"{same} of {len(prompts)}",
    }  # fmt: skip


def chat_prompts(target: Target, count: int) -> list[Prompt]:
    """Prompts of the demo, over and over; random tokens for a model without a tokenizer."""
    if target.tokenizer is None:
        return random_prompts(count, 16, target.config.vocab_size)
    prompts = [row.messages for row in demo_prompts()]
    return [prompts[i % len(prompts)] for i in range(count)]

"""What every strategy brings at every load, measured: `bench --sweep`.

Requests of a load start together and run until the first of them ends, so that the load stays what it is; the clock
runs once all have their first tokens, without the prompts' prefill. Strategies take turns of seconds.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from dspark_jax.decoding.engine import Engine, bucket
from dspark_jax.decoding.profiling import drafter_fingerprint, stamp_of
from dspark_jax.decoding.requests import Completion, Prompt, prompt_token_ids
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.evaluation.load_report import Point
from dspark_jax.evaluation.measurements import chat_prompts, compiled_programs
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.evaluation.report import environment
from dspark_jax.evaluation.timing import CpuUse
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.progress import Progress
from dspark_jax.scheduling.cost_model import CostTable, Drift, load_table, save_table
from dspark_jax.scheduling.json_files import read_json, write_json
from dspark_jax.scheduling.scheduler import BY_COST, drafts_of, parse_strategy
from dspark_jax.serving import load_models, make_engine

LEAST_REQUESTS = 4  # of a turn: at a load below, groups of requests follow each other
TRIES = 3  # a turn in which something had to be compiled is run again


class Plan(NamedTuple):
    """What a sweep runs."""

    loads: Sequence[int]
    strategies: Sequence[str]  # (): those of `default_strategies`
    turns: int
    tokens: int  # of an answer at most


def default_strategies(drafter: Drafter) -> list[str]:
    """Constant lengths, and whatever decides round by round with this drafter."""
    block = drafter.config.num_drafts
    constant = ["off", *(f"fixed:{k}" for k in sorted({1, 2, 3, block}) if k <= block)]
    by_confidence = ["threshold:0.5", "load_aware", "load_aware_async"]
    return [*constant, "dcut", *(by_confidence if getattr(drafter.config, "confidence", False) else [])]


def sweep(config: ConfigDict, plan: Plan, path: Path) -> dict[str, Any]:
    """Measures the loads that `path` does not hold yet, and writes it after each of them. Returns all it then holds.

    The cost table, measured at the start, is kept in `PATH.costs.json`. UserError where the config has no drafter, on
    unknown strategies, and where `path` is of another run.
    """
    target, drafter = load_models(config)
    if drafter is None:
        raise UserError("the sweep compares drafting with plain decoding: set serve.drafter in the config")
    plan = plan._replace(strategies=plan.strategies or default_strategies(drafter))
    for strategy in plan.strategies:
        parse_strategy(strategy, drafter.config.num_drafts)
    report = _resumed(path, _identity(config, target, drafter, plan))
    todo = [load for load in plan.loads if str(load) not in report["loads"]]
    if not todo:
        return report
    contest = Contest(config, target, drafter, plan, path.with_suffix(".costs.json"))
    used = CpuUse()
    groups = sum(_groups(load) for load in todo)
    with Progress("load sweep", groups * len(plan.strategies) * (plan.turns + 1)) as progress:
        for load in todo:
            points = contest.points(load, progress)
            report["loads"][str(load)] = [dataclasses.asdict(point) for point in points]
            report["others_cpu_percent"] = used.others_percent()
            write_json(path, report)
    return report


def points_of(report: dict[str, Any], loads: Sequence[int]) -> list[Point]:
    """The points of a report, load by load."""
    return [Point(**row) for load in sorted(loads) for row in report["loads"][str(load)]]


def _identity(config: ConfigDict, target: Target, drafter: Drafter, plan: Plan) -> dict[str, Any]:
    """What measurements must share to stand in one file."""
    return {
        **environment(), "target": target.name, "fingerprint": target.fingerprint, "dtype": str(target.dtype),
        "drafter": drafter_fingerprint(drafter), "sampler": config.serve.sampler,
        "temperature": config.sampling.temperature, "strategies": list(plan.strategies), "turns": plan.turns,
        "tokens": plan.tokens,
    }  # fmt: skip


def _resumed(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {"run": run, "loads": {}}
    report = read_json(path, "sweep", "remove it to start over")
    before = report.get("run", {})
    differs = [key for key in run if before.get(key) != run[key]]
    if differs:
        raise UserError(f"'{path}' is of another sweep (its {', '.join(differs)} differ): choose another --json")
    return report


class Turn(NamedTuple):
    """What was seen of one strategy, in a group of requests or in all of a turn's."""

    tokens: int
    seconds: float
    completions: list[Completion]


class Contest:
    """An engine for every strategy. Those with a drafter share one page pool, for only one of them runs at a time."""

    def __init__(self, config: ConfigDict, target: Target, drafter: Drafter, plan: Plan, costs: Path):
        self.plan, self.prompts = plan, chat_prompts(target, max(*plan.loads, LEAST_REQUESTS))
        vocab = target.config.vocab_size
        longest = max(len(prompt_token_ids(prompt, target.tokenizer, vocab)) for prompt in self.prompts)
        length = min(bucket(longest + plan.tokens), target.config.max_length)
        slots = max(plan.loads)
        self._options = {"max_slots": slots, "max_length": length, "cache_tokens": slots * length}
        sampling = config.sampling.to_dict() | {"max_tokens": plan.tokens, "min_tokens": 0, "stop": ()}
        self._sampling = SamplingParams(**sampling, ignore_eos=True)
        self._models, self._pools = (config, target, drafter), {}
        table = self._table(costs)
        self.engines = {strategy: self._engine(strategy, table) for strategy in plan.strategies}

    def _engine(self, strategy: str, table: CostTable | None) -> Engine:
        config, target, drafter = self._models
        drafter = None if strategy == "off" else drafter
        engine = make_engine(config, target, drafter, strategy=strategy, cost_table=table, **self._options)
        self._pools.setdefault(drafter is None, engine.caches)
        engine.caches = None
        return engine

    def _table(self, path: Path) -> CostTable | None:
        """The costs of rounds on this machine at these loads, as far as any strategy asks for them."""
        block = self._models[2].config.num_drafts
        parsed = {s: parse_strategy(s, block) for s in self.plan.strategies}
        drafts = {s: drafts_of(strategy, block) for s, strategy in parsed.items() if strategy.name in BY_COST}
        if not drafts:
            return None
        costly = max(drafts, key=drafts.__getitem__)
        if path.exists():
            known = load_table(path, stamp_of(*self._models[1:]))
            slots, contexts = zip(*known.draft, strict=True)
            rows = max(slots) * (drafts[costly] + 1)
            enough = max(slots) >= self._options["max_slots"] and max(contexts) >= self._options["max_length"]
            if enough and max(size[0] for size in known.target) >= rows:
                return known
        table = self._engine(costly, None).load.table
        save_table(path, table)
        return table

    def points(self, load: int, progress: Progress) -> list[Point]:
        """All strategies at a load; the first turn, in which programs are compiled, does not count."""
        turns: dict[str, list[Turn]] = {strategy: [] for strategy in self.engines}
        for number in range(self.plan.turns + 1):
            for strategy, turn in self._turn(load, progress).items():
                turns[strategy] += [turn] if number else []
        return [_point(strategy, load, seen) for strategy, seen in turns.items()]

    def _turn(self, load: int, progress: Progress) -> dict[str, Turn]:
        """Every strategy answers the same groups of prompts, and they take turns from group to group.

        So a busy machine hits all of them, for a group takes seconds.
        """
        groups = [self.prompts[i * load : (i + 1) * load] for i in range(_groups(load))]
        parts: dict[str, list[Turn]] = {strategy: [] for strategy in self.engines}
        for group in groups:
            for strategy in parts:
                parts[strategy].append(self._undisturbed(strategy, group))
                progress.advance(1, f"load {load}, {strategy}")
        return {strategy: _together(seen) for strategy, seen in parts.items()}

    def _undisturbed(self, strategy: str, group: Sequence[Prompt]) -> Turn:
        for _ in range(TRIES):
            programs = compiled_programs()
            part = self._run(strategy, group)
            if compiled_programs() == programs:
                break
        return part

    def _run(self, strategy: str, group: Sequence[Prompt]) -> Turn:
        engine, plain = self.engines[strategy], strategy == "off"
        engine.pages.forget()  # the pool has been written to by others
        engine.caches = self._pools[plain]
        if engine.load:
            engine.load.drift = Drift()  # else a busy machine would set off a new profile in between
        try:
            return _until_first_end(engine, group, self._sampling)
        finally:
            self._pools[plain], engine.caches = engine.caches, None


def _groups(load: int) -> int:
    """Groups of requests that follow each other in a turn."""
    return max(LEAST_REQUESTS // load, 1)


def _together(parts: Sequence[Turn]) -> Turn:
    completions = [completion for part in parts for completion in part.completions]
    return Turn(sum(part.tokens for part in parts), sum(part.seconds for part in parts), completions)


def _until_first_end(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams) -> Turn:
    """Runs requests together until one ends. Counts what came after the last one's first tokens, and its time."""
    params = [dataclasses.replace(sampling, seed=i) for i in range(len(prompts))]
    requests, started, tokens, first, last = engine.requests(prompts, params), set(), 0, 0.0, 0.0
    for request, event in engine.run(requests, engine.rounds):
        now = time.perf_counter()
        if event.finish_reason == "error":
            raise UserError(f"a prompt of the sweep cannot be answered: {request.completion.error}")
        if event.finish_reason == "cancelled":
            continue
        if request.index in started:
            tokens, last = tokens + len(event.token_ids), now
        else:
            started.add(request.index)
            tokens, first = 0, now
        if event.finish_reason:
            for other in requests:
                other.cancelled = True
    if last <= first:
        raise UserError(f"answers of {sampling.max_tokens} tokens end within a dispatch: give more --tokens")
    return Turn(tokens, last - first, [request.completion for request in requests])


def _point(strategy: str, load: int, turns: list[Turn]) -> Point:
    completions = [completion for turn in turns for completion in turn.completions]
    stats, drafted = round_stats(completions), [d for c in completions for d in c.drafted]
    return Point(
        strategy, load, [turn.tokens / turn.seconds for turn in turns], stats.tokens_per_round,
        stats.verified_drafts_per_round, drafted.count(0) / len(drafted), len(drafted),
    )  # fmt: skip

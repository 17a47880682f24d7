"""What the answers of an evaluation amount to: pure functions of the files that `answers.py` writes."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.data.parts import written_rows
from dspark_jax.decoding.requests import Completion
from dspark_jax.errors import UserError
from dspark_jax.evaluation.answers import SETTINGS, SPEEDS, setting_key
from dspark_jax.evaluation.benchmarks import BENCHMARKS, DOMAINS, Benchmark
from dspark_jax.evaluation.metrics import record_rounds, round_stats
from dspark_jax.scheduling.calibration import Reliability, Rounds, Temperatures, reliabilities
from dspark_jax.scheduling.json_files import read_json
from dspark_jax.scheduling.scheduler import confidences, threshold_lengths

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A set at a temperature, as it was saved."""

    benchmark: Benchmark
    temperature: float
    lines: list[dict[str, Any]]
    rounds: Rounds  # of all answers
    temperature_K: np.ndarray  # the confidence head's, as served; 1 where none were fitted
    speed: dict[str, Any] | None


def read_run(out: Path) -> tuple[dict[str, Any], list[Scored]]:
    """The settings of an evaluation, and its sets in the paper's order, temperature by temperature.

    UserError where the folder holds no evaluation, or none of its answers.
    """
    run = read_json(out / SETTINGS, "settings of an evaluation", "run `python -m dspark_jax evaluate --out` first")
    # Of a set that was timed with several numbers of prompts, the greatest counts.
    speeds = {row["setting"]: row for row in sorted(written_rows(out / SPEEDS), key=lambda row: row["prompts"])}
    scored = []
    for benchmark in BENCHMARKS:
        for path in sorted((out / "answers").glob(f"{benchmark.name}.t*.jsonl")):
            temperature = float(path.name.removeprefix(f"{benchmark.name}.t").removesuffix(".jsonl"))
            lines = written_rows(path)
            speed = speeds.get(setting_key(benchmark.name, temperature))
            if any(line["finish_reason"] != "error" for line in lines):
                scored.append(_scored(run, benchmark, temperature, lines, speed))
    if not scored:
        raise UserError(f"{out} holds no answers: run `python -m dspark_jax evaluate --out={out}` first")
    return run, sorted(scored, key=lambda s: s.temperature)


def _scored(
    run: Mapping[str, Any], benchmark: Benchmark, temperature: float, lines: list[dict[str, Any]], speed: Any
) -> Scored:
    block, fitted = run["drafts"], Temperatures(run["drafter_fingerprint"], run["fitted_temperatures"])
    answers = completions(lines, block)
    return Scored(
        benchmark, temperature, lines, record_rounds(answers), fitted.of(run["sampler"], temperature, block), speed
    )


def completions(lines: Iterable[Mapping[str, Any]], block: int) -> list[Completion]:
    """The answers as the engine gave them, without those that were refused. Confidences that were not kept are 0."""
    answers = []
    for line in lines:
        if line["finish_reason"] != "error":
            verified, accepted = line["verified"], line["accepted"]
            logits = line.get("confidence", [[0.0] * block] * len(verified))
            rounds = ([block] * len(verified), verified, accepted, logits)
            answers.append(Completion(line["token_ids"], "", line["finish_reason"], *rounds))
    return answers


# ---------------------------------------------------------------------------------------------------- the report


def summary(run: Mapping[str, Any], scored: Sequence[Scored]) -> dict[str, Any]:
    """The report: the run's settings; by temperature, every set, the means over domains, and the macro-average."""
    temperatures = {}
    for temperature in dict.fromkeys(s.temperature for s in scored):
        sets = {s.benchmark.name: set_report(s, run) for s in scored if s.temperature == temperature}
        domain = {b.name: b.domain for b in BENCHMARKS}
        parts = {d: [sets[name]["metrics"] for name in sets if domain[name] == d] for d in DOMAINS}
        temperatures[f"{temperature:g}"] = {
            "sets": sets,
            "domains": {d: mean_of(part) for d, part in parts.items() if part},
            "macro": mean_of([part["metrics"] for part in sets.values()]),
            "not_in_macro": [b.name for b in BENCHMARKS if b.name not in sets],
        }
    return {"run": dict(run), "temperatures": temperatures}


def set_report(scored: Scored, run: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and metrics of one set at one temperature. What cannot be said for lack of rounds is None."""
    lines, answers = scored.lines, completions(scored.lines, run["drafts"])
    stats = round_stats(answers)
    metrics = {
        "tokens_per_round": stats.tokens_per_round,
        "accepted_drafts_per_round": stats.accepted_drafts_per_round,
        "verify_rate": stats.tokens / (sum(sum(a.verified) for a in answers) + stats.rounds),
        "conditional_acceptance": conditional_acceptance(scored.rounds),
    }
    if run["has_confidence"]:
        positions = reliabilities(scored.rounds, scored.temperature_K)
        metrics["confidence"] = {name: _measures(positions, name) for name in ("ece", "auc", "brier")}
        metrics["sweep"] = threshold_sweep(scored.rounds, scored.temperature_K)
    if scored.speed:
        metrics["speed"] = speed_metrics(scored.speed)
    prompts = {line["conversation"] for line in lines}
    return {
        "prompts": len(prompts), "prompts_of_the_full_set": scored.benchmark.prompts, "answers": len(answers),
        "refused": len(lines) - len(answers), "tokens": stats.tokens, "rounds": stats.rounds,
        "others_cpu_percent": (scored.speed or {}).get("others_cpu_percent"), "metrics": metrics,
    }  # fmt: skip


def conditional_acceptance(rounds: Rounds) -> list[float | None]:
    """P(draft k accepted | it was verified, and all before it were accepted); None where that never came up."""
    k_K = np.arange(rounds.logit_NxK.shape[1])
    tried_K = np.sum((rounds.accepted_N[:, None] >= k_K) & rounds.judged_NxK, axis=0)
    kept_K = rounds.label_NxK.sum(axis=0)
    return [float(kept / tried) if tried else None for kept, tried in zip(kept_K, tried_K, strict=True)]


def threshold_sweep(rounds: Rounds, temperature_K: np.ndarray) -> Metrics:
    """What cutting blocks at confidence thresholds would have brought, computed from rounds of whole blocks.

    A block is cut before the first draft whose own confidence is below the threshold; of its accepted drafts remain
    those before the cut. Rounds that the end of an answer cut off are left out.
    """
    whole_N = rounds.verified_N == rounds.logit_NxK.shape[1]
    accepted_N, names = rounds.accepted_N[whole_N], ("drafts_verified_per_round", "tokens_per_round", "verify_rate")
    if not len(accepted_N):
        return {"threshold": list(THRESHOLDS)} | {name: [None] * len(THRESHOLDS) for name in names}
    confidence_NxK, active_N = (
        np.asarray(confidences(rounds.logit_NxK[whole_N], temperature_K)),
        np.ones(sum(whole_N), bool),
    )
    rows = []
    for threshold in THRESHOLDS:
        length_N = np.asarray(threshold_lengths(confidence_NxK, threshold, active_N))
        verified, tokens = float(length_N.mean()), 1 + float(np.minimum(length_N, accepted_N).mean())
        rows.append((verified, tokens, tokens / (1 + verified)))
    columns = map(list, zip(*rows, strict=True))
    return {"threshold": list(THRESHOLDS), **dict(zip(names, columns, strict=True))}


def speed_metrics(row: Mapping[str, Any]) -> Metrics:
    """Speeds of the batch that was answered both ways, and their ratios."""
    metrics: Metrics = {}
    for name, ratio in (("tokens_per_second", "speedup"), ("tokens_per_second_per_user", "speedup_per_user")):
        plain, drafted = row["plain"].get(name), row["drafted"].get(name)
        metrics |= {f"plain_{name}": plain, name: drafted, ratio: drafted / plain if plain and drafted else None}
    return metrics


def _measures(positions: Sequence[Reliability], name: str) -> list[float | None]:
    values = [float(getattr(position, name)) for position in positions]
    return [None if math.isnan(value) else value for value in values]


def mean_of(parts: Sequence[Any]) -> Any:
    """The unweighted mean of equal structures of dicts, lists and numbers, each over the parts that have it."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], Mapping):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: mean_of([part.get(name) for part in parts]) for name in names}
    if isinstance(parts[0], list):
        return [mean_of(column) for column in itertools.zip_longest(*parts)]
    return sum(parts) / len(parts)


# ---------------------------------------------------------------------------------------------------- pooled rounds


def pooled(scored: Sequence[Scored]) -> tuple[list[Reliability], list[Reliability]]:
    """Reliability of every position over the rounds of all sets of one temperature: the head's own, and as served."""
    parts = [s.rounds for s in scored]
    rounds = Rounds(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Rounds)))
    return reliabilities(rounds), reliabilities(rounds, scored[0].temperature_K)

"""The paper's nine evaluation sets: how many prompts, in which form, and from where (as DeepSpec's evaluator has them).

A set is a file NAME.jsonl whose rows have `turns`, a list of user texts, or is written as one from the hub.
"""

import dataclasses
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.data.prompts import asked_turns, dataset_rows
from dspark_jax.errors import UserError

SEED = 980406  # the reference's: picks the prompts of a set that has more than are run
DOMAINS = ("maths", "code", "chat")
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- prompt forms


def _maths(question: str) -> list[str]:
    return [question + "\nPlease reason step by step, and put your final answer within \\boxed{}."]


def _humaneval(row: Row) -> list[str]:
    lead = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{lead}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    lead = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    shape, code = "Write your code in the following format", "# YOUR CODE HERE"
    if row.get("starter_code"):
        shape, code = "Use the following code structure", row["starter_code"]
    answer = f"### Format: {shape}:\n```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    return [f"{lead}\n\n### Question:\n{row['question_content']}\n\n{answer}"]


def _alpaca(row: Row) -> list[str]:
    return [row["instruction"] + (f"\n\nInput:\n{row['input']}" if row.get("input") else "")]


# ---------------------------------------------------------------------------------------------------- the sets


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """An evaluation set. `prompts` are run, picked with SEED where it has more."""

    name: str  # of its file, without .jsonl
    title: str
    domain: str
    prompts: int
    hub: tuple[str, ...]  # dataset, and its configuration where it has several
    split: str
    turns: Callable[[Row], list[str]]  # user texts of a row of the hub
    files: tuple[str, ...] = ()  # JSONL files of the dataset in order, where it is not read by its card


BENCHMARKS = (
    Benchmark("gsm8k", "GSM8K", "maths", 500, ("openai/gsm8k", "main"), "test", lambda r: _maths(r["question"])),
    Benchmark("math500", "MATH500", "maths", 500, ("HuggingFaceH4/MATH-500",), "test", lambda r: _maths(r["problem"])),
    Benchmark("aime25", "AIME25", "maths", 30, ("MathArena/aime_2025",), "train", lambda r: _maths(r["problem"])),
    Benchmark(
        "mbpp", "MBPP", "code", 256, ("google-research-datasets/mbpp", "sanitized"), "test", lambda r: [r["prompt"]]
    ),
    Benchmark("humaneval", "HumanEval", "code", 164, ("openai/openai_humaneval",), "test", _humaneval),
    Benchmark(
        "livecodebench", "LiveCodeBench", "code", 500, ("livecodebench/code_generation_lite",), "test", _livecodebench,
        ("test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))),
    ),
    Benchmark(
        "mt-bench", "MT-Bench", "chat", 80, ("HuggingFaceH4/mt_bench_prompts",), "train", lambda r: list(r["prompt"])
    ),
    Benchmark("alpaca", "Alpaca", "chat", 500, ("tatsu-lab/alpaca",), "train", _alpaca),
    Benchmark(
        "arena-hard-v2", "Arena-Hard v2", "chat", 500, ("lmarena-ai/arena-hard-auto",), "train",
        lambda r: [r["prompt"]], ("data/arena-hard-v2.0/question.jsonl",),
    ),
)  # fmt: skip


def named(names: Sequence[str]) -> list[Benchmark]:
    """The sets of those names, "all" being all of them, in the paper's order. UserError on an unknown name."""
    known = [b.name for b in BENCHMARKS]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise UserError(f"--sets={','.join(names)}: known are all, {', '.join(known)}")
    return [b for b in BENCHMARKS if "all" in names or b.name in names]


def load_sets(names: Sequence[str], data: str | None, cache: Path) -> tuple[dict[str, list[PromptRow]], list[str]]:
    """Prompts of the sets, by name, and a line for each that cannot be had.

    They are read from the folder `data`; without one from `cache`, where the hub's are written first. Of the sets
    that "all" names some may be missing; UserError when one asked for by its own name is, or when all are.
    """
    if data is not None and not Path(data).is_dir():
        raise UserError(f"--data={data}: no such folder; it should hold NAME.jsonl for every set")
    found, missing = {}, []
    for benchmark in named(names):
        path = Path(data or cache) / f"{benchmark.name}.jsonl"
        try:
            if data is None and not path.exists():
                _fetch(benchmark, path)
            elif not path.is_file():
                raise UserError(f"{benchmark.title}: no such file: {path}")
        except UserError as error:
            if benchmark.name in names:
                raise
            missing.append(str(error))
            continue
        found[benchmark.name] = read_set(benchmark, path)
    if not found:
        raise UserError(f"none of the sets can be had: {missing[0]}")
    return found, missing


def read_set(benchmark: Benchmark, path: Path) -> list[PromptRow]:
    """The prompts of a file that are run; ids are the numbers of their rows, from 0. UserError on a bad row."""
    rows = []
    for line, row in read_jsonl(path):
        try:
            rows.append(PromptRow(str(len(rows)), asked_turns(row)))
        except ValueError as error:
            raise UserError(f"{path}, line {line}: {error}") from None
    if not rows:
        raise UserError(f"{path} has no prompts: it should hold one JSON object with `turns` a line")
    return picked(rows, benchmark.prompts)


def picked(rows: Sequence[Any], count: int) -> list[Any]:
    """All rows where they are no more than `count`, else the first `count` in an order that SEED shuffles."""
    rows = list(rows)
    if len(rows) > count:
        random.Random(SEED).shuffle(rows)
    return rows[:count]


def fingerprint(rows: Sequence[PromptRow]) -> str:
    """16 hex digits of the prompts of a set."""
    text = json.dumps([[row.id, row.messages] for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fetch(benchmark: Benchmark, path: Path) -> None:
    """Writes a set of the hub as a file of `turns`, whole or not at all."""
    names, options = benchmark.hub, {"split": benchmark.split}
    if benchmark.files:
        names = ("json",)
        files = [f"hf://datasets/{benchmark.hub[0]}/{file}" for file in benchmark.files]
        options = {"split": "train", "data_files": files}
    lines = [_line(benchmark, row) for row in dataset_rows(f"{benchmark.title} of the hub", *names, **options)]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text("".join(lines), encoding="utf-8")
    os.replace(fresh, path)


def _line(benchmark: Benchmark, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps({"turns": benchmark.turns(dict(row))}, ensure_ascii=False) + "\n"
    except KeyError as error:
        raise UserError(f"{benchmark.title} of the hub has no field {error}: give the set as a file, --data") from None

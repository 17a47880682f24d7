"""`python -m dspark_jax demo`: shipped prompts, answered as you watch, then plain decoding and DSpark in one table."""

import io
import time
from pathlib import Path

import rich.console
import rich.table
from absl import flags

from dspark_jax.data.conversations import PromptRow, read_prompts
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.evaluation.equality import first_difference
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.evaluation.report import describe_device, environment
from dspark_jax.interop.target_io import Target
from dspark_jax.serving import load_models, make_engine

PROMPTS = Path(__file__).parent / "data" / "demo_prompts.jsonl"
MAX_TOKENS = 128
Timed = list[tuple[Request, float]]  # the same prompt with DSpark and plainly, with the seconds each took


def demo_prompts() -> list[PromptRow]:
    """The shipped prompts: chat, maths, code."""
    return read_prompts(PROMPTS)


def main(argv: list[str]) -> None:
    """Answers the prompts with the config's target and drafter, one after another, greedily."""
    config, given = parse_config(argv, _define)
    console = rich.console.Console(highlight=False)
    rows = demo_prompts()
    console.print(f"loading {config.target.path} ...")
    target, drafter = load_models(config)
    if drafter is None:
        raise UserError("the demo compares a drafter with plain decoding: set serve.drafter in the config")
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    plain = make_engine(config, target, None, strategy="off", max_slots=1)
    spark = make_engine(config, target, drafter, max_slots=1)
    # Every program is compiled before the clock runs: the shortest and the longest prompt need all of them.
    by_length = sorted(rows, key=lambda row: len(row.messages[0]["content"]))
    for engine in (plain, spark):
        engine.generate([row.messages for row in (by_length[0], by_length[-1])], params)
    results = [_answer(console, plain, spark, row, params) for row in rows]
    table = _table(results, rows, target)
    console.print(table)
    console.print(f"target {config.target.path}, drafter {drafter.name}, strategy {config.serve.strategy}")
    if given.svg:
        picture = rich.console.Console(record=True, width=120, file=io.StringIO())
        picture.print(table)
        picture.save_svg(given.svg, title="make demo")


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("svg", None, "also draw the table into this SVG file", flag_values=values)


def _answer(
    console: rich.console.Console, plain: Engine, spark: Engine, row: PromptRow, params: SamplingParams
) -> Timed:
    """One prompt both ways: DSpark streams to the terminal, plain decoding runs silently right after it."""
    console.print(f"\n[bold]{row.messages[-1]['content']}[/bold]")
    timed = []
    for engine, show in ((spark, True), (plain, False)):
        requests = engine.requests([row.messages], params)
        start = time.perf_counter()
        for _, event in engine.run(requests, engine.rounds):
            if show:
                console.print(event.text_delta, end="", markup=False, soft_wrap=True)
        timed.append((requests[0], time.perf_counter() - start))
    console.print()
    return timed


def _table(results: list[Timed], rows: list[PromptRow], target: Target) -> rich.table.Table:
    """Tokens per second and per round of both, and whether the texts are the same token for token."""
    table = rich.table.Table(title=f"plain decoding and DSpark on {describe_device(environment())}")
    for name in ("prompt", "tokens", "plain tok/s", "DSpark tok/s", "speed-up", "tok/round", "same text"):
        table.add_column(name, justify="left" if name in ("prompt", "same text") else "right")
    total = [0, 0.0, 0.0]
    for row, ((fast, fast_s), (slow, slow_s)) in zip(rows, results, strict=True):
        a, b = slow.completion.token_ids, fast.completion.token_ids
        differs = first_difference(target, slow.prompt_ids, a, b, fast.params)
        total = [total[0] + len(b), total[1] + slow_s * len(b) / len(a), total[2] + fast_s]
        table.add_row(
            row.id, str(len(b)), f"{len(a) / slow_s:.1f}", f"{len(b) / fast_s:.1f}",
            f"{len(b) / fast_s * slow_s / len(a):.2f}×", f"{round_stats([fast.completion]).tokens_per_round:.2f}",
            "identical" if differs is None else str(differs),
        )  # fmt: skip
    stats = round_stats([fast.completion for (fast, _), _ in results])
    table.add_section()
    table.add_row(
        "all", str(total[0]), f"{total[0] / total[1]:.1f}", f"{total[0] / total[2]:.1f}", f"{total[1] / total[2]:.2f}×",
        f"{stats.tokens_per_round:.2f}", "",
    )  # fmt: skip
    return table

"""Ratios measured in one run on one machine.

    python -m dspark_jax bench --config=configs/smollm2_135m.py [--repeats=11] [--json=FILE]

A decoding step of ours against one of `transformers` on the same weights, and against the memory's bandwidth; how much
of a speculative round lies outside the target's forward; tokens per second with drafting and without.
"""

from typing import Any

from absl import flags

from dspark_jax.door import define_json, parse_config

BUSY = 10.0  # percent of the CPUs in others' hands, from which on goals are not judged
# Section of the report, row and column; the goal in words; the most that the value may be.
GOALS = (
    ("step", "1", "ratio", "batch 1: step / transformers", 1.15),
    ("step", "16", "ratio", "batch 16: step / transformers", 1.0),
    ("round", "1", "outside_percent", "batch 1: % of round outside target", 25.0),
    ("round", "16", "outside_percent", "batch 16: % of round outside target", 25.0),
)


def main(argv: list[str]) -> None:
    """Measures, prints tables and, on request, writes JSON."""
    config, given = parse_config(argv, define)
    # After the flags: a wrong flag need not wait for JAX.
    from dspark_jax.evaluation.measurements import measure
    from dspark_jax.evaluation.report import write_json

    report = measure(config, given.repeats)
    report["goals"] = goals(report)
    print_tables(report)
    if given.json:
        write_json(given.json, report)


def define(values: flags.FlagValues) -> None:
    """The flags of `bench`."""
    flags.DEFINE_integer("repeats", 11, "times that each step is measured", lower_bound=7, flag_values=values)
    define_json(values)


def busy(report: dict[str, Any]) -> bool:
    """Whether other processes used so much of the machine that ratios say little."""
    return (report["others_cpu_percent"] or 0.0) > BUSY


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's goals for speed. `met` is None where the value was not measured, or on a busy machine."""
    rows = []
    for section, batch, key, words, most in GOALS:
        value = report[section].get(batch, {}).get(key)
        met = None if value is None or busy(report) else value <= most
        rows.append({"goal": words, "at_most": most, "value": value, "met": met})
    return rows


def print_tables(report: dict[str, Any]) -> None:
    """Everything measured, and what was left out and why."""
    from dspark_jax.evaluation.report import describe_device

    print(f"{describe_device(report)}, {report['threads']} threads")
    print(f"{report['target']}, {report['dtype']}; drafter {report['drafter'] or 'none'}; {report['repeats']} repeats")
    print("times in ms: median ± half the interquartile range\n")
    floor, strategy, ratios = report["floor"], report["strategy"], report["floor"]["step_over_floor"]
    step = {batch: row | {"times_floor": ratios[batch]} for batch, row in report["step"].items()}
    _print_rows(f"one plain decoding step behind {report['context_tokens']} tokens", "batch", step)
    speed = f"{floor['weight_bytes'] / 1e6:.0f} MB of weights at {floor['read_gb_per_s']:.1f} GB/s"
    print(f"floor: {speed} take {floor['floor_ms']:.2f} ms")
    _print_rows(f"one round, strategy {strategy}", "batch", report["round"])
    title = f"answers of {report['answer_tokens']} tokens to four prompts: off and {strategy}"
    _print_rows(title, "at a time", report["end_to_end"])
    for what, why in report["skipped"].items():
        print(f"not measured: {what}: {why}")
    count = report["compilations_after_warm_up"]
    verdict = "no program was compiled after warm-up" if not count else f"{count} programs were compiled after warm-up"
    print(f"{verdict} (size of the jit caches before and after the timed parts)")
    _print_goals(report["goals"])
    if busy(report):
        share = f"other processes used {report['others_cpu_percent']:.0f} % of the CPUs"
        print(f"warning: {share}. PyTorch's waiting threads suffer more from that than XLA's: measure again in quiet")


def _print_rows(title: str, key: str, rows: dict[str, dict[str, Any]]) -> None:
    """One line per batch size; a time and its interquartile range share a column."""
    import rich.console
    import rich.table

    if not rows:
        return
    table = rich.table.Table(title=title, title_justify="left")
    names = [name for name in next(iter(rows.values())) if not name.endswith("_iqr_ms")]
    for name in (key, *names):
        table.add_column(name.replace("_percent", " %").replace("_", " "), justify="right")
    for batch, row in rows.items():
        table.add_row(batch, *(_cell(row[name], row.get(f"{name.removesuffix('_ms')}_iqr_ms")) for name in names))
    rich.console.Console().print(table)


def _cell(value: float | int | str, spread: float | None) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text if spread is None else f"{text} ±{spread / 2:.2f}"


def _print_goals(rows: list[dict[str, Any]]) -> None:
    import rich.console
    import rich.table

    table = rich.table.Table("goal", "at most", "measured", "", title="the project's goals", title_justify="left")
    for row in rows:
        unknown = "not measured" if row["value"] is None else "not judged"
        verdict = {None: unknown, True: "met", False: "not met"}[row["met"]]
        measured = "-" if row["value"] is None else f"{row['value']:.2f}"
        table.add_row(row["goal"], f"{row['at_most']:g}", measured, verdict)
    rich.console.Console().print(table)

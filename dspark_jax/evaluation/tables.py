"""An evaluation's report as tables, for the terminal and for the page alike; under each what its columns mean."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.table

from dspark_jax.evaluation.bench import BUSY
from dspark_jax.evaluation.benchmarks import BENCHMARKS

TITLES = {b.name: b.title for b in BENCHMARKS}
_MEASURES = {
    "ece": ("calibration error (ECE)", "Expected calibration error: over 20 equal bins of the predicted survival, the "
            "mean distance between the mean prediction and the share accepted, weighted by rounds. 0 is perfect."),
    "auc": ("ranking power (AUC)", "Area under the ROC curve: the chance that an accepted draft was given a higher "
            "survival than a rejected one. 0.5 is guessing, 1 is perfect; a dash: all or none were accepted."),
    "brier": ("Brier score", "Mean squared distance between the predicted survival and what happened (1 or 0). "
              "0 is perfect."),
}  # fmt: skip
_SURVIVAL = (
    "Position k, survival: the confidences of drafts 1 to k, as the engine uses them, multiplied; it predicts that all "
    "of them are accepted. Judged over all rounds that verified draft k."
)


class Table(NamedTuple):
    """Cells as texts, the first column's to the left; the last row stands apart where it is an average."""

    title: str
    header: list[str]
    rows: list[list[str]]
    definitions: list[str]
    averaged: bool = True


def tables(report: Mapping[str, Any], temperature: str) -> list[Table]:
    """All tables of one temperature."""
    part = report["temperatures"][temperature]
    made = [_overview(part)]
    if "speed" in part["macro"]:
        made.append(_speed(part))
    made.append(_positions(part, "acceptance by position", lambda m: m["conditional_acceptance"], _CONDITIONAL))
    for name, (title, definition) in _MEASURES.items() if report["run"]["has_confidence"] else ():
        texts = [f"{definition} {_SURVIVAL}"]
        made.append(_positions(part, title, lambda m, name=name: m["confidence"][name], texts))
    if "sweep" in part["macro"]:
        made.append(_sweep(part["macro"]["sweep"]))
    return made


_CONDITIONAL = [
    "Conditional acceptance at position k: of the rounds that verified draft k and accepted all before it, the share "
    "that accepted draft k too. Where an answer's end cut a round off, the drafts behind the end are not counted."
]


def notes(report: Mapping[str, Any], temperature: str) -> list[str]:
    """What keeps the numbers of a temperature from being those of the full nine sets on a quiet machine."""
    part, lines = report["temperatures"][temperature], []
    absent = [TITLES[name] for name in part["not_in_macro"]]
    if absent:
        ran = f"{len(part['sets'])} of the {len(BENCHMARKS)} sets"
        lines.append(f"The macro-average is over {ran}; not evaluated: {', '.join(absent)}.")
    few = [
        f"{TITLES[name]} {s['prompts']} of {s['prompts_of_the_full_set']}"
        for name, s in part["sets"].items()
        if s["prompts"] < s["prompts_of_the_full_set"]
    ]
    if few:
        lines.append(f"Fewer prompts than the full sets have: {', '.join(few)}.")
    refused = [f"{TITLES[name]} {s['refused']}" for name, s in part["sets"].items() if s["refused"]]
    if refused:
        lines.append(f"Turns that could not be answered (most are too long for the context): {', '.join(refused)}.")
    used = max((s["others_cpu_percent"] or 0.0 for s in part["sets"].values()), default=0.0)
    if used > BUSY:
        lines.append(f"While speeds were taken, others used up to {used:.0f} % of the CPUs: they say little.")
    return lines


def _overview(part: Mapping[str, Any]) -> Table:
    names = ("tokens_per_round", "accepted_drafts_per_round", "verify_rate")
    header = ["set", "prompts", "answers", "tokens", "rounds", "tokens/round", "drafts/round", "verify rate"]
    rows = [
        [TITLES[name], *(f"{s[n]}" for n in ("prompts", "answers", "tokens", "rounds")), *_cells(s["metrics"], names)]
        for name, s in part["sets"].items()
    ]
    rows.append(["macro-average", *[""] * 4, *_cells(part["macro"], names)])
    return Table("tokens per round", header, rows, [
        "Answers: answered turns; all turns of a prompt are asked, with the model's own answers before them.",
        "Tokens/round: emitted tokens over rounds, the bonus token included (the paper's accepted length τ). Rounds "
        "are pooled over the answers of a set, so that long answers weigh more.",
        "Drafts/round: accepted drafts over rounds, without the bonus.",
        "Verify rate: emitted tokens over rows that the target verified (drafts and one anchor a round).",
        "Macro-average: the unweighted mean over the sets above.",
    ])  # fmt: skip


def _speed(part: Mapping[str, Any]) -> Table:
    names = ("plain_tokens_per_second", "tokens_per_second", "speedup")
    names += tuple(name + "_per_user" for name in names)
    header = ["set", "plain tok/s", "drafted tok/s", "ratio", "plain per user", "drafted per user", "ratio"]
    rows = [[TITLES[name], *_cells(s["metrics"].get("speed") or {}, names)] for name, s in part["sets"].items()]
    rows.append(["macro-average", *_cells(part["macro"]["speed"], names)])
    return Table("speed against plain decoding", header, rows, [
        "Tok/s: tokens of a batch over the seconds it took, the prompts' prefill included. The same prompts (the first "
        "of the set, their first turns) are answered plainly and then with whole blocks drafted, in one process; a "
        "batch in which programs were compiled is repeated. Above temperature 0 the two sides are different draws.",
        "Per user: the median over requests of tokens over the seconds from the first token to the last.",
        "Ratio: drafted over plain. It is of this batch size on this machine; "
        "`python -m dspark_jax bench --sweep` measures others.",
    ])  # fmt: skip


def _positions(
    part: Mapping[str, Any], title: str, get: Callable[[Mapping[str, Any]], list[float | None]], definitions: list[str]
) -> Table:
    """A table of sets by positions of a block."""
    rows = [[TITLES[name], *map(_number, get(s["metrics"]))] for name, s in part["sets"].items()]
    average = get(part["macro"])
    header = ["set", *(str(k + 1) for k in range(len(average)))]
    return Table(title, header, [*rows, ["macro-average", *map(_number, average)]], definitions)


def _sweep(sweep: Mapping[str, list[float | None]]) -> Table:
    names = ("drafts_verified_per_round", "tokens_per_round", "verify_rate")
    rows = [
        [f"{threshold:g}", *map(_number, values)]
        for threshold, *values in zip(sweep["threshold"], *(sweep[name] for name in names), strict=True)
    ]
    header = ["threshold", "drafts verified/round", "tokens/round", "verify rate"]
    return Table("confidence thresholds, macro-average", header, rows, [
        "A block is cut before the first draft whose own confidence is below the threshold, as threshold:c does it. "
        "Computed from the recorded rounds of whole blocks, whose confidences and fates are known, not run anew: "
        "cut rounds would begin at other tokens. Rounds that an answer's end cut off are left out, so tokens/round at "
        "threshold 0 can be a little above the table's on top.",
    ], averaged=False)  # fmt: skip


def _cells(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [_number(values.get(name)) for name in names]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value >= 20 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def print_tables(made: Sequence[Table], console: rich.console.Console) -> None:
    """The tables, each with its definitions below."""
    for table in made:
        drawn = rich.table.Table(title=table.title, title_justify="left")
        for i, name in enumerate(table.header):
            drawn.add_column(name, justify="right" if i else "left", no_wrap=not i, overflow="fold")
        for i, row in enumerate(table.rows):
            drawn.add_row(*row, end_section=table.averaged and i == len(table.rows) - 2)
        console.print(drawn)
        for text in table.definitions:
            console.print(text, style="dim", markup=False, highlight=False)
        console.print()

"""An evaluation as one HTML page with everything in it: no scripts, nothing that is loaded from elsewhere."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark_jax.evaluation.pictures import Picture
from dspark_jax.evaluation.report import describe_device
from dspark_jax.evaluation.tables import Table, notes, tables

# Pictures have white grounds; in the dark they are turned over, with their colours kept.
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --line: #dfe3e8; --ground: #fff; --band: #f6f7f9;
  --accent: #3366b8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --soft: #9aa4b2; --line: #343b46; --ground: #15181d; --band: #1c2027; --accent: #7aa7ee; }
  figure img { filter: invert(.91) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; }
.soft, figcaption, .means { color: var(--soft); font-size: .88rem; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.75rem 0; }
.card { flex: 1 1 13rem; padding: 1rem 1.2rem; background: var(--band); border-radius: .6rem; }
.card b { display: block; font-size: 2rem; line-height: 1.25; color: var(--accent);
  font-variant-numeric: tabular-nums; }
.note { padding: .7rem 1rem; border-left: 3px solid var(--accent); background: var(--band); margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
tr.average td { font-weight: 650; background: var(--band); border-bottom: 0; }
.means { margin: .6rem 0 0; padding-left: 1.1rem; }
figure { margin: 1.75rem 0; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; border-radius: .4rem; }
figcaption { margin-top: .5rem; text-align: center; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
nav a { color: var(--accent); margin-right: 1.2rem; text-decoration: none; }
"""

_NO_LOADS = (
    "<p>Throughput against speed per user (the Pareto front), and budget against load, are measured by "
    "<code>python -m dspark_jax bench --sweep --config=…</code>; "
    "give its JSON to <code>evaluate --sweep=FILE</code>.</p>"
)


def page(report: Mapping[str, Any], pictures: Sequence[Picture], loads: Sequence[Picture]) -> str:
    """The HTML. `loads`: pictures of strategies over loads; where there are none, the page says how to get them."""
    run, parts = report["run"], report["temperatures"]
    body = [
        f"<h1>{escape(_short(run['target']))}, drafted by {escape(_short(run['drafter']))}</h1>",
        f'<p class="soft">{escape(describe_device(run))}, {escape(run["dtype"])}; answers of at most '
        f"{run['sampling']['max_tokens']} tokens</p>",
        f'<div class="cards">{"".join(_cards(parts))}</div>',
        '<nav><a href="#pictures">Pictures</a>',
        *(f'<a href="#t{t}">Temperature {t}</a>' for t in parts),
        '<a href="#settings">Settings</a></nav>',
        '<h2 id="pictures">Pictures</h2>',
        *map(_figure, pictures),
        "<h3>Over loads</h3>",
        *map(_figure, loads),
    ]
    if not loads:
        body.append(_NO_LOADS)
    for temperature in parts:
        body.append(f'<h2 id="t{temperature}">Temperature {temperature}</h2>')
        body += [f'<p class="note">{escape(line)}</p>' for line in notes(report, temperature)]
        body += map(_table, tables(report, temperature))
    body += ['<h2 id="settings">Settings</h2>', _settings(run)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{_title(run)}'
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(
        [*body, "</main></body></html>\n"]
    )


def _title(run: Mapping[str, Any]) -> str:
    return f"<title>Evaluation of {escape(_short(run['drafter']))}</title>"


def _short(name: str) -> str:
    """The last part of a path or hub id."""
    return Path(name).name or name


def _cards(parts: Mapping[str, Any]) -> Iterable[str]:
    """The headline numbers."""
    for temperature, part in parts.items():
        count = f"mean over {len(part['sets'])} set{'s' if len(part['sets']) > 1 else ''}"
        yield (
            f'<div class="card"><b>{part["macro"]["tokens_per_round"]:.2f}</b>tokens per round at temperature '
            f'{temperature}<br><span class="soft">{count}; plain decoding: 1</span></div>'
        )
    for temperature, part in parts.items():
        speedup = (part["macro"].get("speed") or {}).get("speedup")
        if speedup:
            yield (
                f'<div class="card"><b>{speedup:.2f}×</b>plain decoding\'s tokens per second at temperature '
                f'{temperature}<br><span class="soft">whole blocks, this machine</span></div>'
            )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    text = escape(picture.caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    lines = []
    for i, row in enumerate(table.rows):
        kind = ' class="average"' if table.averaged and i == len(table.rows) - 1 else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    means = "".join(f"<li>{escape(text)}</li>" for text in table.definitions)
    return (
        f'<h3>{escape(table.title.capitalize())}</h3>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f'<tbody>{"".join(lines)}</tbody></table></div>\n<ul class="means">{means}</ul>'
    )


def _settings(run: Mapping[str, Any]) -> str:
    """What was run, name by name."""
    rows = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>" for name, value in run.items()
    )
    return f"<dl>{rows}</dl>"

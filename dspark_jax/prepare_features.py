"""Writes the target's features of answered prompts into a cache: python -m dspark_jax prepare-features --config=FILE

Training with data.features=cache then reads them instead of running the target. An interrupted run is continued by the
same command. Several processes (`serve.processes`) share the rows; all must see the same answers and the same cache.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from dspark_jax.data.batches import PAD_TO, SORTED_BATCHES, learnt_length
from dspark_jax.data.cache_writer import CacheWriter, size_line, tokens_digest
from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.data.target_cache import CacheInfo, CacheRows
from dspark_jax.data.turns import Line
from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.parallel import on, parse_mesh, start_processes
from dspark_jax.progress import Progress
from dspark_jax.training.data import check_answers, learnt_rows, make_answers
from dspark_jax.training.drafters import new_drafter_config
from dspark_jax.training.features import Features, target_features
from dspark_jax.training.parts import check_division

_FIELDS = {"id": str, "prompt_ids": list, "answer_ids": list}  # of a row of answers
Numbered = tuple[int, Mapping[str, Any]]  # a training row and its place among all rows


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("answers", None, "JSONL of answers; default: answers.jsonl in the workdir", flag_values=values)


def main(argv: list[str]) -> None:
    config, given = parse_config(argv, define)
    place = cache_place(config)
    check_division(config)
    process, processes = start_processes(config.serve.processes)
    path = given.answers or Path(config.workdir) / "answers.jsonl"
    lines = read_answers(path)
    target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=parse_mesh(config.mesh))
    if Path(f"{path}.run.json").exists():
        check_answers(path, target, config.data.thinking)
    with open_writer(config, target, process, processes) as writer:
        count = fill(config, target, lines, writer)
    if processes > 1:  # all end together: JAX ends those whose fellows have left
        writer.wait_for_all(count)
    print(f"features written to {place}")


def cache_place(config: ConfigDict) -> str:
    """Where features go. Raises UserError when the config does not say."""
    if not config.data.cache:
        raise UserError("where to? set data.cache to a folder, gs://BUCKET/PATH or s3://BUCKET/PATH")
    return config.data.cache


def open_writer(config: ConfigDict, target: Target, process: int = 0, processes: int = 1) -> CacheWriter:
    """A writer to the config's cache, of the features that its drafter reads."""
    taps = new_drafter_config(config, target).tap_layers
    info = CacheInfo.of(target, taps, config.data.cache_dtype, config.data.max_length)
    info = dataclasses.replace(info, thinking=config.data.thinking)
    return CacheWriter(cache_place(config), info, 0, process, processes)


def answers_with_features(config: ConfigDict, target: Target, path: str | Path) -> list[Line]:
    """The answers to the config's prompts and, in the same pass, their features; an interrupted run is continued.

    What the pass cannot write is computed when all is answered. That is everything where servers answer, and where the
    features are for Eagle3, which reads those of the last tokens, which are never run.
    """
    with open_writer(config, target) as writer:
        lines = make_answers(config, target, path, None if config.drafter.kind == "eagle3" else writer)
        writer.finish()  # so that it is known what is there
        fill(config, target, read_answers(path), writer)
    return lines


def fill(config: ConfigDict, target: Target, lines: Sequence[Line], writer: CacheWriter) -> int:
    """Computes the features that the cache lacks, of those rows that are this process's turn.

    Returns how many rows the answers make in all. UserError when the cache holds other answers under their ids.
    """
    rows, info = learnt_rows(lines, target.tokenizer, config.data.thinking), writer.info
    writer.expect(len(rows))
    places = {line["id"]: place for place, line in enumerate(lines)}
    for row in rows:
        if writer.done.get(row["id"], digest := tokens_digest(row)) != digest:
            raise UserError(
                f"{writer.place} holds the features of other answers (of {row['id']!r}, say): give another data.cache"
            )
    todo = [row for row in rows if row["id"] not in writer.done]
    if todo:
        print(size_line(writer.place, info, sum(learnt_length(row, info.max_length) for row in todo)), flush=True)
    # Shared out by place, not by turn: what is done already looks different to processes that start at other times.
    numbered = [(places[row["id"]], row) for row in todo]
    mine = [(place, row) for place, row in numbered if place % writer.processes == writer.process]
    batch_size = config.train.batch_size // config.train.micro_steps  # what training has in memory at a time
    write_features(target.with_taps(info.tap_layers), mine, writer, batch_size)
    return len(rows)


def read_answers(path: str | Path) -> list[dict[str, Any]]:
    """The lines that `train.py` or `prepare answers` wrote, but for prompts that have no answer.

    Raises UserError, naming the line, on any other.
    """
    rows = []
    for number, row in read_jsonl(path):
        if row.get("finish_reason") == "error":
            continue
        of_text = isinstance(row.get("messages"), list)  # a server's: the chat template finds its tokens
        if not of_text and not all(isinstance(row.get(name), kind) for name, kind in _FIELDS.items()):
            raise UserError(f"{path}, line {number}: a row of answers has {', '.join(_FIELDS)}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} is empty: write the answers first")
    return rows


def write_features(target: Target, rows: Sequence[Numbered], writer: CacheWriter, batch_size: int) -> None:
    """Runs the target over rows, in batches of about equal length, and adds what it computes to the cache."""
    max_length = writer.info.max_length
    with on(target.mesh), Progress("features", len(rows)) as progress:
        for batch in _batches(rows, batch_size, max_length):
            lengths = [learnt_length(row, max_length) for _, row in batch]
            token_BxS = np.zeros((batch_size, -(-max(lengths) // PAD_TO) * PAD_TO), np.int32)
            for i, ((_, row), length) in enumerate(zip(batch, lengths, strict=True)):
                token_BxS[i, :length] = (row["prompt_ids"] + row["answer_ids"])[:length]
            out = target_features(target.module, target.params, token_BxS) if max(lengths) else None
            for i, ((number, row), length) in enumerate(zip(batch, lengths, strict=True)):
                writer.add(number, row, length, _rows(out, i, length) if length else None)
            progress.advance(len(batch))


def _rows(features: Features, i: int, length: int) -> CacheRows:
    arrays = (features.taps_BxSxMH, features.last_hidden_BxSxH, features.log_total_BxS)
    return CacheRows(*(np.asarray(array[i])[:length] for array in arrays))


def _batches(rows: Sequence[Numbered], batch_size: int, max_length: int) -> Iterator[Sequence[Numbered]]:
    """Sorted by length within stretches, so that a batch pads little and work goes on about in order."""
    stretch = SORTED_BATCHES * batch_size
    for start in range(0, len(rows), stretch):
        part = sorted(rows[start : start + stretch], key=lambda numbered: learnt_length(numbered[1], max_length))
        for first in range(0, len(part), batch_size):
            yield part[first : first + batch_size]

"""What a drafter is trained on, as a config asks for it: rows found, written or answered, or a cache of features."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dspark_jax.data.answer_features import AnswerFeatures
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.generate import answers_run, write_answers, write_prompts
from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.data.keep_out import KeepOut
from dspark_jax.data.masks import chat_tokens, join_turns, masked_row
from dspark_jax.data.parts import written_rows
from dspark_jax.data.prompts import training_prompts
from dspark_jax.data.reference_cache import ReferenceCache
from dspark_jax.data.servers import ask_servers, find_servers
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.data.turns import Line, conversations, open_turns, thinking_variables, turn_ids
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.sink import Sink
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.interop.tokenizer import Tokenizer
from dspark_jax.scheduling.json_files import read_json, write_json
from dspark_jax.training.features import open_cache


def features_cache(config: ConfigDict, target: Target) -> TargetCache | ReferenceCache | None:
    """The cache to train from, whose rows are then the training rows; None: features are computed online."""
    if config.data.features == "online":
        return None
    if config.data.features != "cache":
        raise UserError(f"data.features={config.data.features!r}: it is online or cache")
    cache = open_cache(config.data.cache, target, target.tap_layers)
    thinking = cache.info.thinking if isinstance(cache, TargetCache) else None
    if thinking not in (None, config.data.thinking):
        raise UserError(
            f"{config.data.cache} was written with data.thinking={thinking!r}, here it is {config.data.thinking!r}: "
            "give the same, or another data.cache"
        )
    if config.drafter.kind == "eagle3" and cache.lacks_last_rows:
        raise UserError(
            f"{config.data.cache} was written while answers were generated, without the last tokens' features, which "
            "Eagle3 learns from: write another with prepare-features"
        )
    return cache


def training_rows(config: ConfigDict, target: Target) -> list[dict[str, Any]]:
    """Rows of `prompt_ids`, `answer_ids` and perhaps a `loss_mask`; answers that are missing are made first.

    Where `data.answers` names a file that is made elsewhere, it is taken as it is. Raises UserError when it is another
    target's, or of another chat template or way of thinking.
    """
    if config.data.answers:
        lines = read_answers(config.data.answers, target, config.data.thinking)
    else:
        lines = make_answers(config, target, Path(config.workdir) / "answers.jsonl")
    return learnt_rows(lines, target.tokenizer, config.data.thinking)


def make_answers(config: ConfigDict, target: Target, path: str | Path, writer: CacheWriter | None = None) -> list[Line]:
    """The answers to the config's prompts, by our engine or by its servers; an interrupted run is continued.

    `writer`: gets the features of what our engine answers.
    """
    data = config.data
    thinking_variables(data.thinking)  # a fault of the config shows before any work
    SamplingParams(top_p=data.top_p, top_k=data.top_k)
    if data.servers and data.prompts:
        return _served_answers(config, target, find_prompts(config), path)
    drafter = load_drafter(data.drafter, target) if data.drafter else None

    def new_engine(sink: Sink | None = None) -> Engine:
        slots = data.max_slots
        return Engine(target, drafter, max_slots=slots, cache_tokens=slots * data.max_length, sink=sink)

    engine = None if writer and data.prompts else new_engine()
    prompts = find_prompts(config, engine)
    if data.servers:
        return _served_answers(config, target, prompts, path)
    features = None
    if writer:
        lines = written_rows(Path(path))
        writer.expect(len(turn_ids(prompts)) + len(lines))  # at most: before all is answered the cache is not complete
        features = AnswerFeatures(writer, target, lines)
        engine = new_engine(features.sink)
    return write_answers(engine, prompts, path, **_sampling(config), features=features)


def _sampling(config: ConfigDict) -> dict[str, Any]:
    """How answers are sampled, as arguments."""
    data = config.data
    return {
        "temperatures": data.temperatures, "max_tokens": data.max_answer_tokens, "seed": config.seed,
        "thinking": data.thinking, "top_p": data.top_p, "top_k": data.top_k,
    }  # fmt: skip


def _served_answers(config: ConfigDict, target: Target, prompts: list[PromptRow], path: str | Path) -> list[Line]:
    """Answers of the config's servers, which need not be there any more when all is answered."""
    if not open_turns(prompts, written_rows(Path(path))):
        ids = turn_ids(prompts)
        return [line for line in read_answers(path, target, config.data.thinking) if line["id"] in ids]
    servers = find_servers(config.data.servers)
    return ask_servers(servers, target, prompts, path, **_sampling(config), at_a_time=config.data.max_slots)


def find_prompts(config: ConfigDict, engine: Engine | None = None) -> list[PromptRow]:
    """The config's prompts, read or written by the engine's target, without evaluation questions.

    What was left out is said on stderr, and in full in WORKDIR/prompts.report.json.
    """
    data, folder = config.data, Path(config.workdir)
    keep_out = KeepOut.of_folder(data.keep_out) if data.keep_out else None
    if data.prompts:
        rows, report = training_prompts(data.prompts, data.num_prompts, keep_out)
        report.print()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "prompts.report.json", dataclasses.asdict(report))
        return rows
    return write_prompts(
        engine,
        folder / "prompts.jsonl",
        data.num_prompts,
        data.openings,
        temperature=data.prompt_temperature,
        max_tokens=data.max_prompt_tokens,
        seed=config.seed,
        keep_out=keep_out,
    )


def read_answers(path: str | Path, target: Target, thinking: str) -> list[Line]:
    """The lines of a file that `prepare answers` wrote, with whatever sampling. UserError when they are foreign."""
    check_answers(path, target, thinking)
    return [line for _, line in read_jsonl(path)]


def check_answers(path: str | Path, target: Target, thinking: str) -> None:
    """Raises UserError when a file of answers is of another target, chat template or way of thinking."""
    stamp = f"{path}.run.json"
    made = read_json(stamp, "record of the answers", f"train on a file that `prepare answers` wrote, with {stamp}")
    own = answers_run(target, (), 0, 0, thinking)
    for key, what in (("target", "target"), ("template", "chat template"), ("thinking", "data.thinking")):
        if made.get(key) != own[key]:
            known = " is ".join(json.dumps(value) for value in (made.get(key), own[key]))
            raise UserError(
                f"{path} was answered with another {what} ({known} here): prepare answers of its own for it"
            )


def learnt_rows(lines: list[Line], tokenizer: Tokenizer | None, thinking: str) -> list[dict[str, Any]]:
    """Rows to train on: tokens as they were generated, or those of the texts where servers gave texts alone.

    Texts that the chat template refuses are left out, and counted on stderr. UserError when it refuses all.
    """
    rows, refusals = [], []
    for turns in conversations(lines):
        if "answer_ids" in turns[0]:
            rows += join_turns([turns])
            continue
        try:
            rows.append(_row_of_texts(turns, tokenizer, thinking))
        except UserError as error:
            refusals.append(error)
    if refusals and not rows:
        raise refusals[0]
    if refusals:
        print(f"{len(refusals)} answered conversations left out: {refusals[0]}", file=sys.stderr, flush=True)
    return rows


def _row_of_texts(turns: list[Line], tokenizer: Tokenizer, thinking: str) -> dict[str, Any]:
    """A conversation as one row, all answers learnt."""
    cut = [i for i, turn in enumerate(turns) if turn["finish_reason"] == "length"]
    ids, spans = chat_tokens(tokenizer, turns[-1]["messages"], cut, **thinking_variables(thinking))
    if not spans:
        raise UserError(f"{tokenizer.source}: the chat template shows none of the answers of {turns[0]['id']!r}")
    conversation = turns[0].get("conversation", turns[0]["id"])
    return {"id": turns[-1]["id"], "conversation": conversation, **masked_row(ids, spans)}


def trained_on(config: ConfigDict, target: Target) -> dict[str, Any]:
    """What a drafter's file keeps of the chats that it was trained on."""
    template = target.tokenizer.template_hash if target.tokenizer else None
    return {"template": template, "thinking": config.data.thinking}

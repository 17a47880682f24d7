"""Data to train on, ahead of training: python -m dspark_jax prepare answers --config=configs/X.py

Answers the config's prompts (`--prompts=FILE` or hf:NAME instead of `data.prompts`) with its target: here, faster where
`data.drafter` names a drafter, or on the OpenAI-compatible servers of `data.servers`. Writes `--out` (else
answers.jsonl in the workdir, where train.py finds it), a line as each turn ends; started again, it goes on from there.
With data.features=cache the target's features of the answers go into data.cache, without another pass of the target.
"""

import collections

from absl import flags

from dspark_jax.door import parse_config
from dspark_jax.errors import UserError


def main(argv: list[str]) -> None:
    if argv[1:2] not in (["answers"], ["--help"]):
        raise UserError("prepare what? known is `prepare answers --config=FILE`")
    config, given = parse_config([argv[0], *(arg for arg in argv[1:] if arg != "answers")], define)
    from dspark_jax.interop.target_io import load_target  # after the flags: a wrong flag need not wait for JAX
    from dspark_jax.parallel import parse_mesh
    from dspark_jax.prepare_features import answers_with_features, cache_place
    from dspark_jax.training.data import make_answers

    if given.prompts:
        with config.unlocked():
            config.data.prompts = given.prompts
    out = given.out or f"{config.workdir}/answers.jsonl"
    with_features = config.data.features == "cache"
    if with_features:
        cache_place(config)  # a fault of the config shows before any work
    target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=parse_mesh(config.mesh))
    lines = (answers_with_features if with_features else make_answers)(config, target, out)
    reasons = collections.Counter(line["finish_reason"] for line in lines)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    print(f"{len(lines)} answers in {out} ({counts})" + (f", features in {config.data.cache}" if with_features else ""))


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("prompts", None, "JSONL of prompts, or hf:NAME[:SPLIT]", flag_values=values)
    flags.DEFINE_string("out", None, "JSONL for the answers", flag_values=values)

"""`python -m dspark_jax export`: a config's drafter as the checkpoint that another program loads.

    python -m dspark_jax export --config=configs/smollm2_135m.py --to=vllm --out=exports/smollm2_vllm

The consumers: deepspec, vllm, sglang, speculators, specforge, and dflash (z-lab's own layout). The directory is written
as a whole or not at all, and the last lines say how the consumer is started with it.
"""

import json
from pathlib import Path

from absl import flags

from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, load_drafter
from dspark_jax.interop.export import check_replaceable, export_drafter
from dspark_jax.interop.export_needs import CONSUMERS, kind_of
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.lookup import Lookup

DTYPES = ("bfloat16", "float16", "float32")


def main(argv: list[str]) -> None:
    """Loads the config's target and drafter (`serve.drafter`) and writes the export. UserError as `export_drafter`."""
    config, given = parse_config(argv, _define)
    if not (given.to and given.out):
        raise UserError(f"export needs --to=({'|'.join(CONSUMERS)}) and --out=DIR")
    if not config.serve.drafter:
        raise UserError("the config names no drafter to export: set serve.drafter")
    check_replaceable(given.out, given.overwrite)
    print(f"loading {config.target.path} and {config.serve.drafter} ...", flush=True)
    target = load_target(config.target.path, dtype=given.dtype)
    drafter = load_drafter(config.serve.drafter, target)
    if isinstance(drafter.config, Lookup):
        raise UserError("a lookup has no weights to export: set serve.drafter to a trained drafter")
    name = given.target_name or target.name
    options = {"dtype": given.dtype, "target_name": name, "overwrite": given.overwrite}
    export_drafter(given.out, drafter, target, given.to, **options)
    for file in sorted(Path(given.out).iterdir()):
        print(f"wrote {file}, {file.stat().st_size / 1e6:,.3f} MB")
    print(
        f"drafts {drafter.config.num_drafts} tokens a round; use it so:\n  {usage(given.to, drafter, name, given.out)}"
    )


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_enum("to", None, CONSUMERS, "who is to load the export", flag_values=values)
    flags.DEFINE_string("out", None, "directory to write", flag_values=values)
    flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "of the weights", flag_values=values)
    flags.DEFINE_string("target_name", None, "hub id of the target, for others to find it", flag_values=values)
    flags.DEFINE_bool("overwrite", False, "replace the model directory that stands at --out", flag_values=values)


def usage(consumer: str, drafter: Drafter, target_name: str, out: str) -> str:
    """How a consumer is started with an export (`checkpoint_formats.md` 8, 11)."""
    kind, count = kind_of(drafter.config), drafter.config.num_drafts
    vllm = {"method": kind.lower(), "model": out, "num_speculative_tokens": count}
    # SGLang counts the last committed token too, so that this is DFlash's block size.
    steps = f"--speculative-num-steps {count} --speculative-eagle-topk 1 " if kind == "Eagle3" else ""
    sglang = f"--speculative-algorithm {kind.upper()} --speculative-draft-model-path {out}"
    return {
        "deepspec": f"python eval.py --target_name_or_path {target_name} --draft_name_or_path {out}",
        "vllm": f"vllm serve {target_name} --speculative-config '{json.dumps(vllm)}'",
        "sglang": f"python -m sglang.launch_server --model-path {target_name} {sglang} {steps}"
        f"--speculative-num-draft-tokens {count + 1}",
        "speculators": f'speculators.SpeculatorModel.from_pretrained("{out}")',
        "specforge": f"as the draft model {out} of the target {target_name}",
        "dflash": f"as the draft model {out} of the target {target_name}",
    }[consumer]

"""Generates answers: python serve.py --config=configs/smollm2_135m.py --prompts=prompts.jsonl --out=answers.jsonl

or, for one prompt that streams to the terminal, --prompt="What is a black hole?"
"""

import sys

from absl import flags

from dspark_jax.door import parse_config, run_door
from dspark_jax.errors import UserError


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("prompts", None, "JSONL of prompts", flag_values=values)
    flags.DEFINE_string("out", None, "JSONL of answers; the report stands beside it", flag_values=values)
    flags.DEFINE_string("prompt", None, "one prompt, answered on the terminal", flag_values=values)


def main() -> None:
    config, given = parse_config(sys.argv, define)
    if (given.prompt is None) == (given.prompts is None) or (given.prompts is None) != (given.out is None):
        raise UserError("give either --prompt=TEXT, or --prompts=FILE together with --out=FILE")
    from dspark_jax.evaluation.report import print_report
    from dspark_jax.serving import serve_file, stream_prompt

    if given.prompts is not None:
        report = serve_file(config, given.prompts, given.out)
    else:
        for part in stream_prompt(config, given.prompt):
            if isinstance(part, dict):
                report = part
            else:
                print(part, end="", flush=True)
        print()
    print_report(report, "report")


if __name__ == "__main__":
    run_door(main)

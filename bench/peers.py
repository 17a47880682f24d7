"""Ours against `transformers`, in one run on one machine's CPUs: python -m bench.peers --config=configs/smollm2_135m.py

Four ways to answer the same prompts greedily with the same weights in float32, one prompt at a time, with as many
threads: `transformers` plainly and with its prompt-lookup speculation, ours without drafting and with the config's
drafter. The ways take turns, each turn answers all prompts, the first one is a warm-up. The first run installs
`transformers` in `.venv-peers`; its process sleeps while ours works, and the other way round.
"""

import subprocess
import sys
import venv
from pathlib import Path

from absl import flags

from dspark_jax.door import define_json, parse_config, run_door
from dspark_jax.errors import UserError

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
ENVIRONMENT = HERE.parent / ".venv-peers"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("prompts", None, "JSONL of prompts; default: the demo's", flag_values=values)
    flags.DEFINE_integer("limit", None, "prompts at most", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("tokens", 128, "of an answer at most", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("turns", 5, "of every way, after the warm-up", lower_bound=2, flag_values=values)
    define_json(values)


def main(argv: list[str]) -> None:
    """Measures and prints one table; with --json writes what it is made of."""
    config, given = parse_config(argv, define)
    from bench.comparison import measure, print_report  # after the flags: a wrong flag need not wait for JAX
    from dspark_jax.scheduling.json_files import write_json

    report = measure(config, peer_python(), given.prompts, given.limit, given.tokens, given.turns)
    print_report(report)
    if given.json:
        write_json(given.json, report)


def peer_python() -> Path:
    """Python of the peer's environment, which is made where it is missing or of other requirements."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed.txt"
    wanted = REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(_names(wanted))} in {ENVIRONMENT.name} ...", flush=True)
        try:
            venv.create(ENVIRONMENT, clear=True, with_pip=True)
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", REQUIREMENTS]
            subprocess.run(command, check=True)
        except (subprocess.CalledProcessError, OSError) as error:
            raise UserError(
                f"the peer could not be installed in {ENVIRONMENT} ({error}): mend it, and start again"
            ) from None
        stamp.write_text(wanted)
    return python


def _names(requirements: str) -> list[str]:
    return [line for line in requirements.splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    run_door(lambda: main(sys.argv))

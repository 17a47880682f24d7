"""The side doors: python -m dspark_jax COMMAND --config=configs/X.py (train.py and serve.py are the main ones)."""

import importlib
import sys

from dspark_jax.door import run_door
from dspark_jax.errors import UserError

# Name -> module whose `main(argv)` runs it, and what it does. A module is imported when its command is called.
COMMANDS = {
    "doctor": ("dspark_jax.doctor", "what is installed, what JAX sees, and whether target and drafter fit together"),
    "bench": ("dspark_jax.evaluation.bench", "times of steps and rounds as ratios, measured against transformers"),
    "export": ("dspark_jax.export", "writes the drafter as the checkpoint that DeepSpec, vLLM, SGLang or others load"),
    "profile": ("dspark_jax.profile", "measures what rounds cost here, for the scheduler"),
    "plan": ("dspark_jax.plan", "memory and time on a TPU or GPU that is not here, from its compiler and by counting"),
    "prepare": ("dspark_jax.prepare", "lets the target answer prompts to train on, here or on servers"),
    "calibrate": ("dspark_jax.calibrate", "fits the confidence head's temperatures on held-out prompts"),
    "prepare-features": ("dspark_jax.prepare_features", "writes the target's features of the answers into a cache"),
    "evaluate": ("dspark_jax.evaluate", "acceptance, confidence and speed of a drafter on nine sets, as one page"),
    "compare": ("dspark_jax.compare", "trains kinds of drafters on the same answers, and evaluates each"),
    "demo": ("dspark_jax.demo", "plain and speculative decoding side by side on a few prompts"),
}


def main(argv: list[str]) -> None:
    """Runs the command that `argv[1]` names. Raises UserError, naming the known ones, when it names none."""
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-h"):
        print(usage())
        return
    if name not in COMMANDS:
        asked = f"unknown command {name!r}" if name else "no command given"
        raise UserError(f"{asked}: known are {', '.join(COMMANDS)} (python -m dspark_jax COMMAND --config=FILE)")
    importlib.import_module(COMMANDS[name][0]).main([f"python -m dspark_jax {name}", *argv[2:]])


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<16} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m dspark_jax COMMAND --config=FILE [--help]", "", *lines])


if __name__ == "__main__":
    run_door(lambda: main(sys.argv))

"""The other side of `bench.peers`: `transformers` in an environment of its own, asked by lines of JSON.

    python bench/transformers_side.py FOLDER THREADS

FOLDER holds settings.json (the arguments of AutoConfig.for_model) and model.safetensors in float32. The first line out
says which versions run. A line in, {"prompts": [[id]], "max_tokens", "eos", "lookup": bool}, is answered by a line
{"seconds", "answers": [[id]], "cpu_seconds"}; the prompts are answered one after another, greedily.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

LOOKUP_TOKENS = 10  # the library's own example of prompt_lookup_num_tokens


def load(folder: Path) -> Any:
    """The model that the folder describes."""
    settings = json.loads((folder / "settings.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def answer(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Answers and the seconds that all of them took."""
    options = {"do_sample": False, "max_new_tokens": asked["max_tokens"], "eos_token_id": asked["eos"] or None}
    options |= {"pad_token_id": asked["eos"][0]} if asked["eos"] else {}
    options |= {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if asked["lookup"] else {}
    answers, start = [], time.perf_counter()
    for prompt in asked["prompts"]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(out[0, len(prompt) :].tolist())
    return {"seconds": time.perf_counter() - start, "answers": answers, "cpu_seconds": time.process_time()}


def main() -> None:
    pipe, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    model = load(Path(sys.argv[1]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions | {"cpu_seconds": time.process_time()}), file=pipe, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), file=pipe, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # who asked is gone
        main()

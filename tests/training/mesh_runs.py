"""What the tests of training on meshes share: a tiny run whose answers are there."""

import json
from pathlib import Path

import numpy as np

from dspark_jax.data.generate import answers_run
from dspark_jax.interop.target_io import load_target
from tests.training.test_train import tiny_config


def answered_config(chat_model, folder, steps=4):
    """A config of eleven random answers of uneven lengths, three of them a step."""
    folder.mkdir(exist_ok=True)
    config = tiny_config(chat_model, folder / "run", steps)
    path, rng = folder / "answers.jsonl", np.random.default_rng(0)
    draw = lambda count: rng.integers(0, 200, count).tolist()  # noqa: E731
    lines = [
        {"id": str(i), "finish_reason": "stop", "prompt_ids": draw(5 + i), "answer_ids": draw(9 + 7 * i % 60)}
        for i in range(11)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = answers_run(load_target(chat_model), (), 0, 0, "")
    Path(f"{path}.run.json").write_text(json.dumps(run))
    config.data.prompts, config.data.answers = "", str(path)
    config.train.batch_size = 3
    return config


def rows_of(config):
    return [json.loads(line) for line in (Path(config.workdir) / "metrics.jsonl").read_text().splitlines()]

"""Tokens per round on answers that the shipped drafter was trained on: what it could do if it had seen enough.

PYTHONPATH=. python docs/experiments/seen_answers.py
"""

import json
from pathlib import Path

from configs.smollm2_135m import get_config
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.interop.target_io import load_target

ANSWERS = Path("data/smollm2_135m_more/answers.jsonl")
COUNT, TOKENS = 24, 160


def main() -> None:
    config = get_config()
    rows = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    greedy = [row for row in rows if row["temperature"] == 0][:COUNT]
    engine = Engine(load_target(config.target.path), config.serve.drafter, strategy="fixed:7", max_slots=8)
    answers = engine.generate([row["prompt_ids"] for row in greedy], SamplingParams(temperature=0, max_tokens=TOKENS))
    pairs = zip(answers, greedy, strict=True)
    same = sum(answer.token_ids == row["answer_ids"][: len(answer.token_ids)] for answer, row in pairs)
    print(
        f"{same} of {COUNT} answers are those of the data; {round_stats(answers).tokens_per_round:.2f} tokens per round"
    )


if __name__ == "__main__":
    main()

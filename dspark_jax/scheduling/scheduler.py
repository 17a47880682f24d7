"""Strategies: how many of the drafted tokens a round verifies."""

from dspark_jax.errors import UserError

STRATEGIES = ("auto", "off", "fixed:k")


def drafts_per_round(strategy: str, block: int) -> int:
    """Tokens drafted and verified per slot and round. `block`: the drafter's tokens per block, 0 without a drafter.

    "auto" verifies the whole block, "off" none, "fixed:k" k of them. Raises UserError on anything else.
    """
    if strategy == "off" or (strategy == "auto" and not block):
        return 0
    if strategy == "auto":
        return block
    name, _, count = strategy.partition(":")
    if name != "fixed" or not count.isdecimal() or int(count) < 1:
        raise UserError(f"unknown strategy {strategy!r}: known are {', '.join(STRATEGIES)} (k at least 1)")
    if not block:
        raise UserError(f"strategy {strategy!r} needs a drafter: give one, or use strategy 'off'")
    if int(count) > block:
        raise UserError(f"strategy {strategy!r} asks for more tokens than the drafter's block predicts ({block})")
    return int(count)

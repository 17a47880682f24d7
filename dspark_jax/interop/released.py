"""Drafters that their makers have released, by the target they were trained for."""

from pathlib import Path

# Hub ids: the best drafter of DeepSpec's collection for each of its targets.
RELEASED = {
    "Qwen/Qwen3-4B": "deepseek-ai/dspark_qwen3_4b_block7",
    "Qwen/Qwen3-8B": "deepseek-ai/dspark_qwen3_8b_block7",
    "Qwen/Qwen3-14B": "deepseek-ai/dspark_qwen3_14b_block7",
    "google/gemma-4-12B-it": "deepseek-ai/dspark_gemma4_12b_block7",
}


def released_for(target: str) -> str | None:
    """The hub id of a target's drafter. `target`: its hub id, or a directory (or bare name) that ends as that does."""
    path = Path(target).expanduser()
    for hub_id, drafter in RELEASED.items():
        anywhere = "/" not in target or path.exists()  # another owner's model of that name is another model
        if target == hub_id or (anywhere and path.name == hub_id.rpartition("/")[2]):
            return drafter
    return None

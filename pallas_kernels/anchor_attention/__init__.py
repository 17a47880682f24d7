"""Training attention of packed draft blocks: a block sees the context before its anchor and itself, by indices."""

from pallas_kernels.anchor_attention.reference import anchor_attention

__all__ = ["anchor_attention"]

"""Attention of many requests' flat rows over their cached prefixes: verification, decoding, prefill, drafting."""

from pallas_kernels.ragged_attention.reference import Prefix, Rows, ragged_attention, ragged_rows, step_attention

__all__ = ["Prefix", "Rows", "ragged_attention", "ragged_rows", "step_attention"]

"""Verification from the target's hidden states: logits `[N, V]` are neither written nor read."""

from pallas_kernels.fused_verify.reference import Head, Query, RowStatistics
from pallas_kernels.fused_verify.verify import Drafts, Verified, fused_verify, row_statistics, serves

__all__ = [
    "Drafts", "Head", "Query", "RowStatistics", "Verified", "fused_verify", "row_statistics", "serves",
]  # fmt: skip

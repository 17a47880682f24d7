"""What a run achieved: metrics, comparisons, tables."""

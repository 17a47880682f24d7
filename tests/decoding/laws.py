"""The law that tokens must follow, and whether a sample does. Seeds are fixed: a verdict never changes between runs."""

import numpy as np
import scipy.stats

from dspark_jax.decoding.sampling import SamplingParams

PASS, FAIL = 1e-4, 1e-9  # p-values of what must be exact, and of mistakes made on purpose


def law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Rows of probabilities, by sorting: written apart from `pallas_kernels.warp`."""
    if params.temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    out = []
    for row in np.asarray(logits, np.float64) / params.temperature:
        p = np.exp(row - row.max())
        order = np.argsort(-p)
        kept = order[: params.top_k or None]
        mass = np.cumsum(p[kept]) / p[kept].sum()
        kept = kept[: np.searchsorted(mass, params.top_p - 1e-9) + 1]
        kept = kept[p[kept] >= params.min_p * p.max()]
        out.append(np.where(np.isin(np.arange(len(p)), kept), p, 0))
    return np.array(out) / np.sum(out, axis=-1, keepdims=True)


def chi_square(samples: np.ndarray, probability: np.ndarray) -> float:
    """p-value of samples `[R, n]` (or `[R]`) against their law; impossible outcomes that occur give 0."""
    samples = samples[:, None] if samples.ndim == 1 else samples
    cells = np.ravel_multi_index(tuple(samples.T), probability.shape)
    seen, expected = np.bincount(cells, minlength=probability.size), probability.ravel() * len(samples)
    if seen[expected == 0].any():
        return 0.0
    # Cells too thin for the approximation are thrown together, and into the thinnest other one if need be.
    order = np.argsort(expected)
    thin = max(np.searchsorted(np.cumsum(expected[order]), 5), np.sum(expected < 5) - 1) + 1
    seen, expected = (np.append(a[order[thin:]], a[order[:thin]].sum()) for a in (seen, expected))
    if len(seen) == 1:
        return 1.0
    return scipy.stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue

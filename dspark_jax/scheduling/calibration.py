"""Calibration of the confidence head: how far off it is, and temperatures that mend it (NumPy only).

Confidences of a round are logits z_k; the survival p_k = Π_{i≤k} σ(z_i / T_i) should be the share of rounds in which
drafts 0 to k are all accepted. Sequential Temperature Scaling (DSpark) fits T from left to right. The measures are
those of the reference's recorder.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.scheduling.json_files import read_json, write_json

BINS = 20  # of the calibration error
AUC_BINS = 1000
LEAST_ROUNDS = 100  # a temperature fitted to fewer rounds would follow their noise
FILE_NAME = "temperatures.json"
BAND_EDGES = (0.0, 0.5, 0.9, 1.3)  # sampling temperatures that accept alike share the head's temperatures
_GRID = np.exp(np.linspace(-math.log(8), math.log(8), 121))
GRID = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]  # from 1 outwards: a tie leaves the head as it is
_WHAT, _MEND = "temperatures file", "run `python -m dspark_jax calibrate`"


@dataclasses.dataclass(frozen=True)
class Rounds:
    """N recorded rounds. They must have verified a length that does not hang on the confidences, best the block."""

    logit_NxK: np.ndarray  # of the confidence head, before any temperature
    verified_N: np.ndarray  # drafts that were verified
    accepted_N: np.ndarray  # drafts that were accepted

    @property
    def judged_NxK(self) -> np.ndarray:
        """Drafts whose fate was seen."""
        return np.arange(self.logit_NxK.shape[1]) < self.verified_N[:, None]

    @property
    def label_NxK(self) -> np.ndarray:
        """Whether the draft and all before it were accepted."""
        return np.arange(self.logit_NxK.shape[1]) < self.accepted_N[:, None]

    def survival(self, temperature_K: np.ndarray | float = 1.0) -> np.ndarray:
        """p `[N, K]` in float64."""
        return np.cumprod(_sigmoid(self.logit_NxK / temperature_K), axis=1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(logits, np.float64)))


# ---------------------------------------------------------------------------------------------------- measures


@dataclasses.dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram."""

    low: float
    high: float
    mean_survival: float
    accepted: float  # share
    rounds: int


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How well the survivals of one position fit what happened. All but `rounds` and `bins` are NaN without rounds."""

    rounds: int
    ece: float  # expected calibration error
    brier: float  # mean squared error
    auc: float  # P(an accepted draft has the higher survival); NaN if all or none were accepted
    mean_survival: float
    accepted: float  # share
    bins: list[Bin]


def reliability(survival_N: np.ndarray, label_N: np.ndarray) -> Reliability:
    """The measures of one position, over rounds in which it was judged."""
    p_N, y_N = np.clip(survival_N, 1e-8, 1 - 1e-8), np.asarray(label_N, np.float64)
    if not len(p_N):
        return Reliability(0, *[math.nan] * 5, [])
    bin_N = _bin(p_N, BINS)
    count_B, p_B, y_B = (np.bincount(bin_N, weight_N, BINS) for weight_N in (np.ones_like(p_N), p_N, y_N))
    bins = [
        Bin(b / BINS, (b + 1) / BINS, p_B[b] / count_B[b], y_B[b] / count_B[b], int(count_B[b]))
        for b in np.flatnonzero(count_B)
    ]
    brier = float(np.mean((p_N - y_N) ** 2))
    return Reliability(len(p_N), float(_ece(p_N, y_N)), brier, _auc(p_N, y_N), p_N.mean(), y_N.mean(), bins)


def reliabilities(rounds: Rounds, temperature_K: np.ndarray | float = 1.0) -> list[Reliability]:
    """The measures of every position."""
    columns = zip(rounds.survival(temperature_K).T, rounds.label_NxK.T, rounds.judged_NxK.T, strict=True)
    return [reliability(p_N[judged_N], y_N[judged_N]) for p_N, y_N, judged_N in columns]


def means(positions: list[Reliability]) -> dict[str, float]:
    """ECE, Brier and AUC over all positions, weighted by their rounds; each over positions that have it."""
    results = {}
    for name in ("ece", "brier", "auc"):
        found = [(getattr(p, name), p.rounds) for p in positions if not math.isnan(getattr(p, name))]
        weight = sum(rounds for _, rounds in found)
        results[name] = sum(value * rounds for value, rounds in found) / weight if weight else math.nan
    return results


def _bin(p: np.ndarray, bins: int) -> np.ndarray:
    return np.clip(np.floor(bins * p).astype(int), 0, bins - 1)


def _ece(p_GxN: np.ndarray, y_N: np.ndarray) -> np.ndarray:
    """Σ_b n_b·|mean p − mean y| / n over equal bins, for every row of p."""
    rows = p_GxN.reshape(-1, len(y_N))
    bin_GxN = _bin(rows, BINS) + BINS * np.arange(len(rows))[:, None]
    gap = np.bincount(bin_GxN.ravel(), (rows - y_N).ravel(), BINS * len(rows)).reshape(len(rows), BINS)
    return (np.abs(gap).sum(axis=1) / len(y_N)).reshape(p_GxN.shape[:-1])


def _auc(p_N: np.ndarray, y_N: np.ndarray) -> float:
    """From a histogram; pairs in one bin count half."""
    bin_N = _bin(p_N, AUC_BINS)
    positive_B, negative_B = (np.bincount(bin_N, weight_N, AUC_BINS) for weight_N in (y_N, 1 - y_N))
    pairs = positive_B.sum() * negative_B.sum()
    below_B = np.cumsum(negative_B) - negative_B
    return float((positive_B * (below_B + 0.5 * negative_B)).sum() / pairs) if pairs else math.nan


# ---------------------------------------------------------------------------------------------------- fitting


def fit_temperatures(rounds: Rounds) -> np.ndarray:
    """STS: `[K]`. From left to right, each T_k makes the calibration error of p_k least, those before it fixed.

    A position that fewer than LEAST_ROUNDS rounds have judged keeps 1. UserError if that is so of the first.
    """
    if np.sum(rounds.verified_N > 0) < LEAST_ROUNDS:
        few = int(np.sum(rounds.verified_N > 0))
        raise UserError(f"calibration needs {LEAST_ROUNDS} rounds with verified drafts, got {few}: record more prompts")
    if not np.isfinite(rounds.logit_NxK).all():
        raise UserError("the recorded confidences are not all finite: the drafter is damaged, load another checkpoint")
    temperature_K = np.ones(rounds.logit_NxK.shape[1])
    before_N = np.ones(len(rounds.logit_NxK))
    columns = zip(rounds.logit_NxK.T, rounds.label_NxK.T, rounds.judged_NxK.T, strict=True)
    for k, (z_N, y_N, judged_N) in enumerate(columns):
        if judged_N.sum() >= LEAST_ROUNDS:
            p_GxN = before_N[judged_N] * _sigmoid(z_N[judged_N] / GRID[:, None])
            temperature_K[k] = GRID[np.argmin(_ece(p_GxN, y_N[judged_N]))]
        before_N *= _sigmoid(z_N / temperature_K[k])
    return temperature_K


# ---------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class Temperatures:
    """Fitted temperatures of one drafter, by sampler and band of sampling temperatures."""

    drafter: str  # fingerprint
    fitted: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)

    def of(self, sampler: str, temperature: float, block: int) -> np.ndarray:
        """T `[block]` for a request; 1, the head's own confidence, where nothing was fitted for its like."""
        fitted = self.fitted.get(key(sampler, temperature), [])[:block]
        return np.array([*fitted, *[1.0] * (block - len(fitted))], np.float32)

    def with_fit(self, sampler: str, temperature: float, temperature_K: np.ndarray) -> "Temperatures":
        """These and one more, which replaces an older one of its like."""
        return Temperatures(self.drafter, {**self.fitted, key(sampler, temperature): list(map(float, temperature_K))})


def key(sampler: str, temperature: float) -> str:
    """Name of requests that share temperatures, as "rejection 0.5-0.9": bands exclude their lower edge."""
    if temperature <= 0:
        return f"{sampler} greedy"
    low = max(edge for edge in BAND_EDGES if edge < temperature)
    high = next((f"{edge:g}" for edge in BAND_EDGES if edge >= temperature), "")
    return f"{sampler} {low:g}-{high}"


def save_temperatures(directory: str | Path, temperatures: Temperatures) -> None:
    """Writes them beside the drafter."""
    write_json(Path(directory) / FILE_NAME, dataclasses.asdict(temperatures))


def load_temperatures(directory: str | Path, drafter: str) -> Temperatures:
    """The temperatures beside a drafter of that fingerprint; none if there is no file.

    UserError on a damaged file and on one of another drafter.
    """
    path = Path(directory) / FILE_NAME
    if not path.exists():
        return Temperatures(drafter)
    value = read_json(path, _WHAT, _MEND)
    missing = [name for name in ("drafter", "fitted") if name not in value]
    if missing:
        raise UserError(f"{_WHAT} '{path}' lacks {missing[0]!r}: {_MEND}")
    if value["drafter"] != drafter:
        raise UserError(f"{_WHAT} '{path}' is of drafter {value['drafter']!r}, this one is {drafter!r}: {_MEND}")
    try:
        fitted = {name: [float(t) for t in values] for name, values in value["fitted"].items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{_WHAT} '{path}' is malformed ({error}): {_MEND}") from None
    for name, values in fitted.items():
        if not all(0 < t < math.inf for t in values):
            raise UserError(f"{_WHAT} '{path}': a temperature of {name!r} is not positive: {_MEND}")
    return Temperatures(drafter, fitted)

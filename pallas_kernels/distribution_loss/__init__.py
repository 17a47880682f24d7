"""The training loss of draft slots from hidden states: no `[slots, vocabulary]` logits are kept."""

from pallas_kernels.distribution_loss.loss import distribution_loss
from pallas_kernels.distribution_loss.reference import RowLosses, Rows, RowWeights, Targets, Vocabulary

__all__ = ["RowLosses", "RowWeights", "Rows", "Targets", "Vocabulary", "distribution_loss"]

"""Training a drafter: anchors, losses, the step, checkpoints, the loop."""

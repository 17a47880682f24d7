"""Files from elsewhere: checkpoints of targets and drafters, tokenizers, GGUF."""

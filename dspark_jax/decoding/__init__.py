"""One round of speculative decoding, and the engine that runs rounds for many requests."""

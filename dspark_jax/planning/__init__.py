"""Planning: what fits on which TPU or GPU, and about how fast it is, with no such machine at hand."""

"""What the networks compute: thin Flax Linen modules, parameters as nested dicts."""

"""Trains a DSpark drafter: python train.py --config=configs/smollm2_135m.py [--config.train.steps=500]"""

import sys

from dspark_jax.door import parse_config, run_door


def main() -> None:
    config, _ = parse_config(sys.argv)
    from dspark_jax.training.loop import train  # after the flags: a wrong flag need not wait for JAX

    print(f"drafter written to {train(config)}")


if __name__ == "__main__":
    run_door(main)

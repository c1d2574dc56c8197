"""Target models in Flax NNX, exported as pure functions."""

"""Training drafters: the target's own answers as data, and trainers that learn from them."""

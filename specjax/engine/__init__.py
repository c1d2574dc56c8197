"""The compiled rounds, and the host around them."""

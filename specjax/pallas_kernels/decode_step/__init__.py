"""The whole step of a dense decoder, all layers, as one op."""

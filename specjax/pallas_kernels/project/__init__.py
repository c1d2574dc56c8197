"""The product that decoding is made of: rows by a weight stored `[out, in]`."""

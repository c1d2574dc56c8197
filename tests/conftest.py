"""Set before anything imports JAX: the CPU, full-precision products, and no network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

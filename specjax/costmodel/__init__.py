"""Which draft shape pays: device facts, latency tables, acceptance estimates, the planner and its simulator.

Nothing here sees a model or a device: it is numpy and the shape of a draft, so it can be read and tested alone.
`planner.py` is where everything meets.
"""

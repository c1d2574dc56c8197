"""Accept rules: pure functions of a draft and the target's distribution; no model in sight."""

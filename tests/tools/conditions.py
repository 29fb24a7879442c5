"""The conditions of a recorded run, for tests that write records."""

CONDITIONS = {"device": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0, "date": "2026-01-01"}

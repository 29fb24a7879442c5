"""The conditions of a recorded run, for tests that write records."""

CONDITIONS = {"device": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0, "date": "2026-01-01"}
CARD = {  # all that `schema.faults` asks for
    "device": "NVIDIA H200",
    "driver": "580",
    "memory_mib": 1.0,
    "torch": "2.11",
    "cuda": "13.0",
    "python": "3.12",
    "date": "2026-01-31",
}

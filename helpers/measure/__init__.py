"""Time on a GPU: the stopwatch, the workloads, the record of a rung, tuning, and clocks read inside a kernel."""

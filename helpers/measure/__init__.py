"""Time on a GPU: the stopwatch, the workloads, tuning, and clocks read inside a kernel."""

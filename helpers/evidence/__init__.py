"""Whether the X-ray is true: access patterns and seeded bugs, compared with hardware counters and compute-sanitizer."""

"""Whether the X-ray is true: access patterns, seeded bugs, and what hardware counters and compute-sanitizer say of them."""

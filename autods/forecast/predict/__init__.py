"""Pure predictions from a simulation: memory by allocator models, step time by clocks and prices, and the verdict."""

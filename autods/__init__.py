"""Find the fastest DeepSpeed configuration that fits."""

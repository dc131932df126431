"""Models of our own, where a library's is the bottleneck; tests prove them equal to it."""

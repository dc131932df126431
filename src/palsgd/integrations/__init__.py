"""Training frameworks that own the loop. Each module here imports its framework, so that palsgd
needs none of them."""

"""What pays on a cluster: `palsgd plan`."""

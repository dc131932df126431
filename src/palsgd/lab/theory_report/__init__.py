"""What `palsgd theory` shows of the studies in palsgd.theory: a page, figures and tables."""

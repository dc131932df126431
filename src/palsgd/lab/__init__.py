"""Workloads and experiments on top of the library, which never imports them."""

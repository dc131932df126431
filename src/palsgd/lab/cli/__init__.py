"""The command line."""

from palsgd.lab.cli.main import app, bench_app, data_app, main

__all__ = ["app", "bench_app", "data_app", "main"]

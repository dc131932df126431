"""Reports of runs, made from their files alone: an HTML page, a table, TensorBoard files."""

from palsgd.lab.report.page import write_report
from palsgd.lab.report.tensorboard import write_tensorboard
from palsgd.lab.report.terminal import terminal_table
from palsgd.lab.run_folder import Run, find_runs

__all__ = ["Run", "find_runs", "terminal_table", "write_report", "write_tensorboard"]

"""What a command that was stopped has left in its folder. It is said after Ctrl-C, so nothing here
imports torch, which may not be there yet."""

from pathlib import Path

from palsgd.lab.run_folder import RunFolder


def kept(out: Path) -> str:
    """One sentence: the runs that are finished, and how far the others are kept."""
    folders = [RunFolder(path.parent) for path in sorted(out.glob("*/config.yaml"))]
    done = [folder for folder in folders if folder.finished or folder.failure]
    saved = {folder.path: _saved_step(folder) for folder in folders if folder not in done}
    steps = sorted({step for step in saved.values() if step is not None})
    parts = []
    if done:
        parts.append(f"{_runs(len(done))} finished")
    if steps:
        count = sum(step is not None for step in saved.values())
        span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        parts.append(f"{_runs(count)} up to the last checkpoint (step {span})")
    if not parts:
        return "nothing is kept, as no run had its first checkpoint yet"
    return f"kept: {', '.join(parts)}"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _saved_step(folder: RunFolder) -> int | None:
    """The step of a run's newest checkpoint. Simulated runs that share a program have theirs with
    the first of them."""
    first = next(iter(folder.config().get("program", [])), folder.path.name)
    return max(RunFolder(folder.path.parent / first).saved_steps, default=None)

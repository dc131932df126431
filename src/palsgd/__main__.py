"""`python -m palsgd`, and the script `palsgd`."""

import sys

from palsgd import interrupts

# A worker process runs its parent's program first of all, under another name. Python leaves that
# out for programs of packages, which it tells by their spec.
__spec__ = None
if "--multiprocessing-fork" in sys.orig_argv:
    interrupts.leave_to_parent()


def main() -> None:
    interrupts.install()
    try:
        from palsgd.lab.cli import main as run
    except ImportError as error:
        sys.exit(f"palsgd: {error}; the command line needs: pip install 'palsgd[lab]'")
    run()


if __name__ == "__main__":
    main()

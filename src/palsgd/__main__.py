"""`python -m palsgd`, and the script `palsgd`."""

import signal
import sys

from palsgd import interrupts

# A worker process imports this module first of all. Ctrl-C reaches it too, and its parent speaks.
if "multiprocessing.spawn" in sys.modules and __name__ != "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    interrupts.install()
    try:
        from palsgd.lab.cli import main as run
    except ImportError as error:
        sys.exit(f"palsgd: {error}; the command line needs: pip install 'palsgd[lab]'")
    run()


if __name__ == "__main__":
    main()

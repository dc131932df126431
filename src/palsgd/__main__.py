"""`python -m palsgd`, and the script `palsgd`."""

import sys

from palsgd import interrupts


def main() -> None:
    interrupts.install()
    try:
        from palsgd.lab.cli import main as run
    except ImportError as error:
        sys.exit(f"palsgd: {error}; the command line needs: pip install 'palsgd[lab]'")
    run()


if __name__ == "__main__":
    main()

"""Holds the store of a run: python -m palsgd.transports.elastic HOST:PORT."""

import sys
import threading

from torch.distributed import TCPStore


def main(place: str) -> None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise SystemExit(f"{place!r} is no HOST:PORT; give for instance 10.0.0.1:29500")
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(f"MASTER_ADDR={host} MASTER_PORT={store.port}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        del store


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")

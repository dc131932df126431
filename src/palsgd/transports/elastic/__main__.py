"""Holds the store of a run: python -m palsgd.transports.elastic HOST:PORT."""

import socket
import sys
import threading

from torch.distributed import TCPStore


def held(host: str, port: int) -> TCPStore:
    """A store that listens on this address alone. Port 0: any that is free."""
    listening = socket.create_server((host, port))
    own = listening.getsockname()[1]
    # the store closes the socket itself
    return TCPStore(
        host, own, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def main(place: str) -> None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise SystemExit(f"{place!r} is no HOST:PORT; give for instance 10.0.0.1:29500")
    try:
        store = held(host, int(port))
    except OSError as error:
        raise SystemExit(f"no store at {place}: {error.strerror}; give another port") from None
    print(f"MASTER_ADDR={host} MASTER_PORT={store.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")

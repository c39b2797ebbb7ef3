"""A bad cable: ``python lossy.py INTERFACE INTERFACE SHARE`` passes frames between both, but for a share each way."""

from __future__ import annotations

import random
import select
import socket
import sys
from contextlib import suppress

ETH_P_ALL, SOL_PACKET, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 3, 263, 23, 33
MOST = 2**16  # bytes of a frame


def end(interface: str) -> socket.socket:
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    line.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)  # else it would pass on what it has passed on
    line.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**24)
    line.bind((interface, ETH_P_ALL))
    return line


def main() -> None:
    one, other = map(end, sys.argv[1:3])
    drawn, share = random.Random(0), float(sys.argv[3])
    print("ready", flush=True)
    while True:
        for line in select.select([one, other], [], [])[0]:
            frame = line.recv(MOST)
            if drawn.random() >= share:
                with suppress(OSError):  # a queue is full, or the cable pulled: it is lost too
                    (other if line is one else one).send(frame)


if __name__ == "__main__":
    main()

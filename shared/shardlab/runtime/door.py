"""How ranks reach their launcher: a socket in the launch's private folder, where only this user may knock.

On systems without Unix sockets it is a port of the loopback interface, chosen by the system.
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from pathlib import Path

Address = str | tuple[str, int]


class Door:
    """The launcher's side. Has a fileno, so it can stand in `multiprocessing.connection.wait`."""

    def __init__(self, folder: Path, most_waiting: int) -> None:
        if hasattr(socket, "AF_UNIX"):
            self._socket = socket.socket(socket.AF_UNIX)
            self.address: Address = str(folder / "door")
        else:
            self._socket = socket.socket(socket.AF_INET)
            self.address = ("127.0.0.1", 0)
        self._socket.bind(self.address)
        if not isinstance(self.address, str):
            self.address = self._socket.getsockname()
        self._socket.listen(most_waiting)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Connection:
        return Connection(self._socket.accept()[0].detach())

    def close(self) -> None:
        self._socket.close()


def knock(address: Address) -> Connection:
    """The rank's side: a connection to the launcher."""
    client = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    client.connect(address)
    return Connection(client.detach())

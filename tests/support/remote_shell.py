"""A remote shell over TCP for tests, as ssh is one: the line to a host fails when the host's network does.

`remote_shell.py serve ADDRESS PORT` runs the commands that come; `remote_shell.py PORT NAME=ADDRESS,... HOST COMMAND` has one run.
As with sshd, a command whose client is gone finds the end of its standard input, and is not killed.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from typing import BinaryIO

_HEAD = struct.Struct("<BI")  # stream (1, 2; 0: the exit code), bytes


def serve(address: str, port: int) -> None:
    listener = socket.create_server((address, port))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def _serve_one(connection: socket.socket) -> None:
    source = connection.makefile("rb")
    command = source.readline().decode().rstrip("\n")
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    writing = threading.Lock()
    pumps = [
        threading.Thread(target=_pump, args=(connection, writing, number, pipe), daemon=True)
        for number, pipe in ((1, process.stdout), (2, process.stderr))
    ]
    threading.Thread(target=_feed, args=(source, process.stdin), daemon=True).start()
    for pump in pumps:
        pump.start()
    for pump in pumps:
        pump.join()
    _send(connection, writing, 0, bytes([process.wait() % 256]))
    connection.close()


def _pump(connection: socket.socket, writing: threading.Lock, number: int, pipe: BinaryIO) -> None:
    while data := os.read(pipe.fileno(), 4096):
        _send(connection, writing, number, data)


def _send(connection: socket.socket, writing: threading.Lock, number: int, data: bytes) -> None:
    try:
        with writing:
            connection.sendall(_HEAD.pack(number, len(data)) + data)
    except OSError:
        return


def _feed(source: BinaryIO, sink: BinaryIO) -> None:
    try:
        while data := source.read1(4096):
            sink.write(data)
            sink.flush()
        sink.close()
    except OSError:
        return


def call(port: int, addresses: str, host: str, command: str) -> int:
    address = dict(entry.split("=") for entry in addresses.split(","))[host]
    try:
        connection = socket.create_connection((address, port), timeout=5.0)
    except OSError as error:
        print(f"connect to host {host}: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    connection.sendall(command.encode() + b"\n")
    threading.Thread(target=_forward, args=(connection,), daemon=True).start()
    source = connection.makefile("rb")
    while head := source.read(_HEAD.size):
        number, size = _HEAD.unpack(head)
        data = source.read(size)
        if number == 0:
            return data[0]
        os.write(number, data)
    return 255


def _forward(connection: socket.socket) -> None:
    while data := os.read(0, 4096):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        code = call(int(sys.argv[1]), *sys.argv[2:5])
        sys.stdout.flush()
        os._exit(code)  # a thread may be reading standard input

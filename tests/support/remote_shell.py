"""A remote shell over TCP for tests, as ssh is one: the line to a host fails when the host's network does.

`remote_shell.py serve ADDRESS PORT` runs the commands that come; `remote_shell.py PORT NAME=ADDRESS,... HOST COMMAND` has one run.
As with sshd, a command whose client is gone finds the end of its standard input, and is not killed.
"""

import asyncio
import os
import socket
import struct
import sys
import threading
from contextlib import suppress

_HEAD = struct.Struct("<BI")  # stream (1, 2; 0: the exit code), bytes


async def serve(address: str, port: int) -> None:
    async with await asyncio.start_server(_answer, address, port) as server:
        await server.serve_forever()


async def _answer(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    command = (await source.readline()).decode().rstrip("\n")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_shell(command, **pipes, start_new_session=True)
    feeding = asyncio.create_task(_feed(source, process.stdin))
    await asyncio.gather(_pump(1, process.stdout, sink), _pump(2, process.stderr, sink))
    await _send(sink, 0, bytes([await process.wait() % 256]))
    feeding.cancel()
    sink.close()


async def _pump(number: int, pipe: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await pipe.read(4096):
        await _send(sink, number, data)


async def _send(sink: asyncio.StreamWriter, number: int, data: bytes) -> None:
    with suppress(OSError):
        sink.write(_HEAD.pack(number, len(data)) + data)
        await sink.drain()


async def _feed(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(4096):
            sink.write(data)
            await sink.drain()
        sink.close()


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
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    else:
        code = call(int(sys.argv[1]), *sys.argv[2:5])
        sys.stdout.flush()
        os._exit(code)  # a thread may be reading standard input

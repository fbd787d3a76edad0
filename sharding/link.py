"""The connections between the processes of a run: what process 0 says to all, and how they notice that one is gone.

Process 0 is connected with every other one. Whatever ends a process, the others end too, with an error that names it and
exit code 1: its connection closes, or nothing is heard from it for `peer_timeout` seconds, or it says that it failed. This is
seen to by a thread of its own, for the main thread may be waiting for a device that waits for the dead process.
"""

import atexit
import contextlib
import ctypes
import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_GRACE_SECONDS = 3
"""How long a process that ends waits for the others to learn why, or to learn why itself."""


def process_name(number: int, host: str) -> str:
    return f"process {number} ({host})"


def hold_aborts() -> None:
    """Let `abort()` wait for 6 seconds, in which the link ends the process in its own way.

    When process 0 dies, JAX's client in the others calls abort() within milliseconds, without saying which host is to
    blame, and it cannot be told not to. So SIGABRT, which is number 6, is handled by the C library's own `sleep`: it gets
    the number as its argument, and needs no interpreter.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class _Peer:
    """One connection. Messages are lines of JSON, [kind, body]; an empty line only says that somebody is alive."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.connection = connection
        self.finished = False  # it has done all that it had to, and may close
        self.silent = 0.0  # seconds
        self._sending = threading.Lock()
        self._received = b""

    def send(self, line: bytes) -> None:
        """Blocks while the other side does not read. Raises OSError if it has closed."""
        with self._sending:
            self.connection.sendall(line)

    def beat(self) -> None:
        """Never blocks: no beat is needed while something is being sent, or while earlier ones have not been read."""
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self.connection.send(b"\n", socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self) -> list[Any]:
        """The messages that are there. Raises OSError if the other side has closed."""
        data = self.connection.recv(2**16)
        if not data:
            raise ConnectionResetError("closed")
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


class Link:
    """What connects this process with the others; made by `paxserve.sharding.join`.

    hosts: names of the hosts, by process.
    peers: connections, by process: with all others in process 0, with process 0 in each other one.
    exit: ends the process.
    """

    def __init__(
        self,
        process_id: int,
        hosts: Sequence[str],
        peers: Mapping[int, socket.socket],
        peer_timeout: float,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self.process_id = process_id
        self.num_processes = len(hosts)
        self.names = [process_name(number, host) for number, host in enumerate(hosts)]
        self.peer_timeout = peer_timeout
        self.closed = False
        self._exit = exit
        self._peers = {number: _Peer(self.names[number], connection) for number, connection in peers.items()}
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False  # process 0 has said that nothing more follows
        self._stuck = 0.0  # seconds since then without a message taken
        self._all_finished = threading.Event()
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="link", daemon=True)
        self._thread.start()
        atexit.register(self._leave_early)

    def send(self, message: Any) -> None:
        """From process 0 to all others, in order: anything that JSON can hold but None."""
        self._send("message", message)

    def receive(self) -> Any:
        """The next message of process 0; waits for it. None when nothing more follows."""
        message = self._inbox.get()
        self._stuck = 0.0
        return message

    def fail(self, reason: str) -> None:
        """End this process, and with it all others, because of something that went wrong here."""
        time.sleep(_GRACE_SECONDS)  # it may have gone wrong because another process died: then that is what to say
        self._give_up(f"{self.names[self.process_id]} failed: {reason}")

    def finish(self) -> None:
        """In process 0: nothing more follows; waits until the others have finished. In the others: finished."""
        if self.process_id == 0:
            self._send("end")
            self._all_finished.wait()
        else:
            self._send("finished")
            self._peers[0].finished = True

    def close(self) -> None:
        """Stop watching; call it when all have finished."""
        self.closed = True
        atexit.unregister(self._leave_early)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        for peer in self._peers.values():
            peer.connection.close()

    def _send(self, kind: str, body: Any = None) -> None:
        line = json.dumps([kind, body], allow_nan=False).encode() + b"\n"
        for peer in self._peers.values():
            try:
                peer.send(line)
            except OSError:
                self._give_up(f"{peer.name} is gone: its connection broke")

    def _watch(self) -> None:
        try:
            self._watch_peers()
        except Exception as error:  # whatever it is, nobody would watch any more
            self._give_up(f"{self.names[self.process_id]} failed: {error!r}")

    def _watch_peers(self) -> None:
        interval = min(1.0, self.peer_timeout / 4)
        before = beaten = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while not self.closed:
                heard = {key.data for key, _ in selector.select(interval)}
                now = time.monotonic()
                # While this process itself was suspended nobody can be said to have been silent.
                elapsed, before = min(now - before, 2 * interval), now
                for key in list(selector.get_map().values()):
                    self._attend(key.data, selector, key.data in heard, elapsed)
                if now - beaten >= interval:
                    beaten = now
                    for peer in self._peers.values():
                        peer.beat()
                if self._ended and not self._peers[0].finished:
                    self._stuck += elapsed
                    if self._stuck > self.peer_timeout:
                        self._give_up(f"{self._peers[0].name} ended in the middle of what it had begun")

    def _attend(self, peer: _Peer, selector: selectors.BaseSelector, heard: bool, elapsed: float) -> None:
        if not heard:
            peer.silent += elapsed
            if peer.silent > self.peer_timeout:
                self._give_up(f"nothing heard from {peer.name} for {self.peer_timeout:g} s (peer_timeout)")
            return
        peer.silent = 0.0
        try:
            messages = peer.receive()
        except OSError:
            selector.unregister(peer.connection)
            if not peer.finished:
                self._give_up(f"{peer.name} is gone: its connection broke")
            return
        for kind, body in messages:
            if kind == "message":
                self._inbox.put(body)
            elif kind == "end":
                self._ended = True
                self._inbox.put(None)
            elif kind == "finished":
                peer.finished = True
                if all(each.finished for each in self._peers.values()):
                    self._all_finished.set()
            elif kind == "failed":
                self._give_up(body)

    def _give_up(self, reason: str) -> None:
        """Tell the others, say why, and end the process, whatever its other threads are waiting for."""
        with self._giving_up:  # for good: who comes second waits for the end
            line = json.dumps(["failed", reason]).encode() + b"\n"
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.connection.send(line, socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"paxserve: error: {reason}\n".encode())
            if self.process_id == 0:
                self._see_off()
            self._exit(1)

    def _see_off(self) -> None:
        """Wait until the others have ended: if JAX's service went with this process first, they would say so instead."""
        deadline = time.monotonic() + _GRACE_SECONDS
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                while (left := deadline - time.monotonic()) > 0:
                    peer.connection.settimeout(left)
                    if not peer.connection.recv(2**16):
                        break

    def _leave_early(self) -> None:
        """At exit: JAX would wait for the others, and they for this process."""
        if not self.closed:
            sys.stdout.flush()
            time.sleep(_GRACE_SECONDS)
            self._give_up(f"{self.names[self.process_id]} ended before the run did")

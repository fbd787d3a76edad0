"""Start-up of one program on several hosts: every process finds its place, all meet, and `jax.distributed` starts.

Before JAX starts, all processes connect to process 0 by TCP. JAX's own start aborts every process when one is missing,
without saying which; here the time-out names it. The connections stay open as a `Link`.
"""

import contextlib
import json
import math
import socket
import time
from dataclasses import dataclass
from typing import Any

import jax

from paxserve.sharding.clusters import detect_cluster
from paxserve.sharding.link import Link, hold_aborts, process_name

_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 10  # in which whoever connects must say who it is


class ClusterError(ValueError):
    """The processes of a run did not come together; says which."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of a run.

    address: "host:port" at which process 0 meets the others.
    """

    address: str
    num_processes: int
    process_id: int

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


def find_place(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None, timeout: float
) -> Place | None:
    """The place of this process, None if it is the only one.

    What is None is taken from Slurm, GKE or the Cloud TPU VM that the process runs in; without these it must be given,
    or else there is one process. `timeout` is how long, in seconds, the name of process 0's host may be unknown.
    Raises ValueError if some of the three are known and others are not.
    """
    place: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    if num_processes == 1:
        return None
    if None in place.values():
        cluster = detect_cluster()
        if cluster is not None:
            place["num_processes"] = num_processes or cluster.get_process_count()
            if place["num_processes"] == 1:
                return None
            if process_id is None:
                place["process_id"] = cluster.get_process_id()
            if coordinator_address is None:
                place["coordinator_address"] = cluster.get_coordinator_address(
                    timeout_secs=int(timeout), override_coordinator_port=None
                )
        elif not any(value is not None for value in place.values()):
            return None
    if missing := [name for name, value in place.items() if value is None]:
        raise ValueError(
            f"{', '.join(missing)} must be given: this process runs in no cluster that is detected (Slurm, TPUs on GKE, Cloud "
            "TPU VMs)"
        )
    if not 0 <= place["process_id"] < place["num_processes"]:
        raise ValueError(
            f"process_id={place['process_id']}: must be from 0 to num_processes - 1 = {place['num_processes'] - 1}"
        )
    return Place(place["coordinator_address"], place["num_processes"], place["process_id"])


def join(place: Place, *, start_timeout: float, peer_timeout: float) -> Link:
    """Meet the other processes and start `jax.distributed` with them. Nothing may have used a device before.

    Raises ClusterError, naming them, if processes are missing after `start_timeout` seconds. From then on a process that
    dies or is silent for `peer_timeout` seconds ends this one: see `Link`.
    """
    link, port = meet(place, start_timeout, peer_timeout)
    hold_aborts()
    # JAX would have SIGTERM ignored until all processes agree to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{place.address.rpartition(':')[0]}:{port}",
        place.num_processes,
        place.process_id,
        cluster_detection_method=None if detect_cluster() else "deactivate",
        initialization_timeout=math.ceil(start_timeout),
        heartbeat_timeout_seconds=int(100 + 3 * peer_timeout),  # the link must be the first to notice
        shutdown_timeout_seconds=int(100 + 3 * peer_timeout),
    )
    return link


def leave(link: Link) -> None:
    """End a run in agreement: process 0 waits until the others have done all that it sent, and all stop `jax.distributed`."""
    if not link.closed:
        link.finish()
        jax.distributed.shutdown()
        link.close()


def meet(place: Place, start_timeout: float, peer_timeout: float) -> tuple[Link, int]:
    """(the link of this process, a free port on process 0's host that JAX may use). Raises what `join` raises."""
    hosts, peers, port = _gather(place, start_timeout) if place.process_id == 0 else _attend(place, start_timeout)
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(place.process_id, hosts, peers, peer_timeout), port


def _gather(place: Place, timeout: float) -> tuple[list[str], dict[int, socket.socket], int]:
    """Process 0 waits for all others and tells them who is there."""
    deadline = time.monotonic() + timeout
    hosts: dict[int, str] = {0: socket.gethostname()}
    peers: dict[int, socket.socket] = {}
    with _listen(place.host_port[1]) as listener:
        while len(hosts) < place.num_processes and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError):
                peer, _ = listener.accept()
                hello = _receive(peer, _HELLO_SECONDS)
                if hello is None or hello.keys() != {"process_id", "num_processes", "host"}:
                    peer.close()  # a stranger, or one that has given up
                    continue
                number = hello["process_id"]
                error = None
                if hello["num_processes"] != place.num_processes:
                    error = f"num_processes is {hello['num_processes']} there and {place.num_processes} in process 0"
                elif number in hosts and not _has_left(peers.get(number)):
                    error = f"{process_name(number, hosts[number])} is there already; give each its own process_id"
                if error is not None:
                    _send(peer, {"error": f"{process_name(number, hello['host'])}: {error}"})
                    peer.close()
                    continue
                hosts[number], peers[number] = hello["host"], peer
    missing = [f"process {number}" for number in range(place.num_processes) if number not in hosts]
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    answer: dict[str, Any] = {"hosts": [hosts.get(number) for number in range(place.num_processes)], "port": port}
    if missing:
        there = ", ".join(process_name(number, hosts[number]) for number in sorted(hosts))
        answer = {
            "error": f"{', '.join(missing)} of {place.num_processes} did not start within {timeout:g} s (start_timeout); "
            f"there are {there}"
        }
    for peer in peers.values():
        peer.settimeout(None)
        _send(peer, answer)
    if missing:
        raise ClusterError(answer["error"])
    return answer["hosts"], peers, port


def _attend(place: Place, timeout: float) -> tuple[list[str], dict[int, socket.socket], int]:
    """Another process reports to process 0, and waits until all are there."""
    deadline = time.monotonic() + timeout
    missing = f"process 0 did not answer at {place.address} within {timeout:g} s (start_timeout)"
    while True:
        try:
            peer = socket.create_connection(place.host_port, timeout=max(deadline - time.monotonic(), _RETRY_SECONDS))
            break
        except OSError as error:  # not started yet, or its name not known yet
            if time.monotonic() > deadline:
                raise ClusterError(f"{missing}: {error}") from error
            time.sleep(_RETRY_SECONDS)
    host = socket.gethostname()
    _send(peer, {"process_id": place.process_id, "num_processes": place.num_processes, "host": host})
    # Process 0 may have started later than this one, and names the missing when its own time is over.
    answer = _receive(peer, timeout + _HELLO_SECONDS)
    if answer is None:
        raise ClusterError(f"{missing} that all processes are there")
    if "error" in answer:
        raise ClusterError(answer["error"])
    return answer["hosts"], {0: peer}, answer["port"]


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever has left meanwhile is missed later
        peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, timeout: float) -> dict[str, Any] | None:
    """One line; None if none comes in time, or no message of ours. Reads no byte beyond it: a link's lines may follow."""
    deadline = time.monotonic() + timeout
    line = b""
    try:
        while not line.endswith(b"\n"):
            peer.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (byte := peer.recv(1)):
                return None
            line += byte
        message = json.loads(line)
        return message if isinstance(message, dict) else None
    except (OSError, ValueError):
        return None


def _has_left(peer: socket.socket | None) -> bool:
    if peer is None:
        return False
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True

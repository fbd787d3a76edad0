"""What connects the processes of a run, without JAX: who is missing is named, and who dies ends the others."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paxserve.sharding import link
from paxserve.sharding.distributed import ClusterError, Place, find_place, meet
from paxserve.sharding.link import Link

PATIENT = 60.0


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def gather(places, start_timeout=PATIENT):
    """What `meet` returns or raises in each place, all of them at once."""

    def outcome(place):
        try:
            return meet(place, start_timeout, PATIENT)[0]
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(outcome, places))


class Ends:
    """Processes of one run, connected in this one; `codes` and the errors are those with which they ended."""

    def __init__(self, count, peer_timeout=PATIENT):
        self.pairs = [socket.socketpair() for _ in range(count - 1)]
        self.codes = [threading.Event() for _ in range(count)]
        hosts = [f"host-{number}" for number in range(count)]
        peers = [{n: pair[0] for n, pair in enumerate(self.pairs, 1)}, *({0: pair[1]} for pair in self.pairs)]
        self.links = [
            Link(number, hosts, peers[number], peer_timeout, lambda code, number=number: self._end(number, code))
            for number in range(count)
        ]

    def _end(self, number, code):
        assert code == 1
        self.codes[number].set()
        self.links[number].closed = True  # as the real one: nothing of this process goes on
        for peer in self.links[number]._peers.values():
            peer.connection.close()
        threading.Event().wait()

    def stop(self, number):
        """What is heard of a process that is suspended: nothing, while its connections stay."""
        self.links[number].closed = True
        self.links[number]._thread.join()

    def assert_ended(self, *numbers):
        for number in numbers:
            assert self.codes[number].wait(PATIENT), number


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(link, "_GRACE_SECONDS", 0.2)
    made = []

    def make(*args, **options):
        made.append(Ends(*args, **options))
        return made[-1]

    yield make
    for each in made:
        for end in each.links:
            end.closed = True


def finish(links):
    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(Link.finish, links))
    for each in links:
        each.close()


def test_all_meet_and_get_the_same_messages_in_order():
    address = free_address()
    links = gather([Place(address, 3, number) for number in (2, 0, 1)])
    leader = links[1]
    assert [each.names for each in links] == [[f"process {n} ({socket.gethostname()})" for n in range(3)]] * 3
    for number in range(100):
        leader.send({"number": number, "text": "é\n" * number})
    followers = [links[0], links[2]]
    for each in followers:
        assert [each.receive()["number"] for _ in range(100)] == list(range(100))
    finish(links)
    assert all(each.receive() is None for each in followers)


def test_a_missing_process_is_named_to_all_that_came():
    address, host = free_address(), socket.gethostname()
    found = gather([Place(address, 4, number) for number in (0, 2)], start_timeout=3)
    expected = (
        "process 1, process 3 of 4 did not start within 3 s (start_timeout); "
        f"there are process 0 ({host}), process 2 ({host})"
    )
    assert found == [expected, expected]


def test_a_missing_first_process_is_named():
    address = free_address()
    (found,) = gather([Place(address, 2, 1)], start_timeout=1)
    assert found.startswith(f"process 0 did not answer at {address} within 1 s (start_timeout)")


def test_a_process_that_does_not_belong_is_refused():
    address = free_address()
    found = gather([Place(address, 2, 0), Place(address, 3, 1)], start_timeout=3)
    assert found[0].startswith("process 1 of 2 did not start")
    assert "num_processes is 3 there and 2 in process 0" in found[1]
    found = gather([Place(address, 3, 0), Place(address, 3, 1), Place(address, 3, 1)], start_timeout=3)
    assert found[0].startswith("process 2 of 3 did not start")
    assert any("is there already; give each its own process_id" in each for each in found[1:])


def test_strangers_do_no_harm():
    place = Place(free_address(), 2, 0)

    def disturb():
        deadline = time.monotonic() + PATIENT
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"a": 1}\n', b""):
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection(place.host_port, timeout=1) as stranger:
                        stranger.sendall(words)
                    break
                except OSError:
                    time.sleep(0.05)

    thread = threading.Thread(target=disturb)
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, place, PATIENT, PATIENT)
        thread.join()
        second, port = meet(Place(place.address, 2, 1), PATIENT, PATIENT)
        assert first.result()[1] == port
    finish([first.result()[0], second])


@pytest.mark.parametrize("victim", [0, 1])
def test_who_dies_ends_the_others(ends, victim, capfd):
    run = ends(3)
    run.stop(victim)
    run.links[victim].close()
    run.assert_ended(*{0, 1, 2} - {victim})
    errors = capfd.readouterr().err.splitlines()
    assert errors == [f"paxserve: error: process {victim} (host-{victim}) is gone: its connection broke"] * 2


def test_who_is_silent_ends_the_others(ends, capfd):
    run = ends(2, peer_timeout=0.4)
    run.stop(1)
    run.assert_ended(0)
    assert "nothing heard from process 1 (host-1) for 0.4 s (peer_timeout)" in capfd.readouterr().err


def test_silence_is_not_held_against_those_who_beat(ends):
    run = ends(3, peer_timeout=0.5)
    time.sleep(1.5)
    assert not any(code.is_set() for code in run.codes)


def test_a_failure_is_told_to_all(ends, capfd):
    run = ends(3)
    threading.Thread(target=run.links[2].fail, args=("ValueError: no such file",), daemon=True).start()
    run.assert_ended(0, 1, 2)
    errors = capfd.readouterr().err.splitlines()
    assert errors == ["paxserve: error: process 2 (host-2) failed: ValueError: no such file"] * 3


def test_who_waits_for_a_process_that_has_ended_is_not_kept(ends, capfd):
    """Process 0 was interrupted between telling of a step and taking it: the other one waits for it, on a device."""
    run = ends(2, peer_timeout=0.5)
    run.links[0].send("a step")
    threading.Thread(target=run.links[0].finish, daemon=True).start()
    assert run.links[1].receive() == "a step"
    run.assert_ended(1, 0)
    assert "process 0 (host-0) ended in the middle of what it had begun" in capfd.readouterr().err


def test_a_peer_that_does_not_read_does_not_stop_the_watch(ends):
    """Its buffers are full, so process 0's main thread hangs in `send`; the silence is noticed all the same."""
    run = ends(2, peer_timeout=0.5)
    run.stop(1)

    def flood():
        while True:
            run.links[0].send("x" * 2**16)

    threading.Thread(target=flood, daemon=True).start()
    run.assert_ended(0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), None),
        ((None, 1, None), None),
        (("a:1", 1, 0), None),
        (("a:1", 2, 1), Place("a:1", 2, 1)),
    ],
)
def test_places(given, expected):
    assert find_place(*given, 1.0) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", None, None), "num_processes, process_id must be given"),
        ((None, 2, 0), "coordinator_address must be given"),
        (("a:1", 2, 2), "process_id=2: must be from 0 to num_processes - 1 = 1"),
    ],
)
def test_half_a_place_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        find_place(*given, 1.0)


def test_slurm_is_detected(monkeypatch):
    variables = {"JOB_ID": "7", "STEP_NODELIST": "node[04-09]", "NTASKS": "6", "PROCID": "2", "LOCALID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = find_place(None, None, None, 1.0)
    assert (place.num_processes, place.process_id, place.host_port[0]) == (6, 2, "node04")
    assert find_place("a:1", None, None, 1.0) == Place("a:1", 6, 2)
    assert find_place(None, 1, None, 1.0) is None


def test_tpus_on_gke_are_detected(monkeypatch):
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    variables = {"TPU_WORKER_HOSTNAMES": "localhost,other", "TPU_WORKER_ID": "1"}
    slices = {"NUM_SLICES": "1", "SLICE_ID": "0", "COORDINATOR_ADDRESS": "localhost"}
    for name, value in {**variables, **{f"MEGASCALE_{name}": value for name, value in slices.items()}}.items():
        monkeypatch.setenv(name, value)
    place = find_place(None, None, None, 1.0)
    assert (place.num_processes, place.process_id, place.host_port[0]) == (2, 1, "localhost")


def test_messages_are_json_without_infinities(ends):
    run = ends(2)
    with pytest.raises(ValueError, match="JSON"):
        run.links[0].send(float("inf"))

"""Hostile surroundings, and hundreds of launches in a row."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import cloudpickle
import psutil
import pytest
import torch.distributed as dist

from launching import nothing_left, sum_of_ranks
from scripts import ends_right, script
from shardlab import launch
from shardlab.errors import LaunchError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# Hostile surroundings


def test_stray_files_beside_the_notebook(tmp_path) -> None:
    for name in ("socket", "random", "select", "pickle", "queue", "signal", "types", "typing", "copy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a stray file')\n")
    (tmp_path / "mine.py").write_text("VALUE = 7\n")
    body = f"""
    os.chdir({str(tmp_path)!r})  # only now, for this script has sys.path[0] == "", as a notebook has
    def own():
        import mine, sched, wave
        return mine.VALUE
    print(launch(own).results, launch(total).results, "right")
    """
    assert "[7, 7] [2.0, 2.0] right" in ends_right(script(body))


def unshared(*options: str) -> tuple[str, ...]:
    command = ("unshare", *options)
    try:
        works = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip(f"this machine does not allow {' '.join(command)}")
    return command


def test_only_loopback_is_up_and_the_host_name_does_not_resolve() -> None:
    prefix = (*unshared("-nu"), "sh", "-c", 'ip link set lo up && hostname nowhere.invalid && exec "$@"', "sh")
    body = 'import socket\nprint(socket.gethostname(), launch(total, 3).results, "right")'
    assert "nowhere.invalid [3.0, 3.0, 3.0] right" in ends_right(script(body, prefix))


def test_ranks_talk_over_loopback_whatever_the_host_name_means(tmp_path) -> None:
    (tmp_path / "hosts").write_text("10.9.9.9 elsewhere\n127.0.0.1 localhost\n")
    setting = (
        "ip link set lo up && ip addr add 10.9.9.9/32 dev lo && hostname elsewhere && "
        'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    )
    prefix = (*unshared("-num"), "sh", "-c", setting, "sh", str(tmp_path / "hosts"))
    body = """
    import psutil, socket
    def addresses():
        total()
        return sorted({link.laddr.ip for link in psutil.Process().net_connections("inet")})
    print(socket.gethostbyname(socket.gethostname()), launch(addresses).results, "right")
    """
    assert "10.9.9.9 [['127.0.0.1'], ['127.0.0.1']] right" in ends_right(script(body, prefix))


def test_read_only_folder_and_small_dev_shm(tmp_path) -> None:
    mounts = (
        'mount -t tmpfs -o size=64m none /dev/shm && mount -t tmpfs -o ro none "$1" && cd "$1" && shift && exec "$@"'
    )
    prefix = (*unshared("-m"), "sh", "-c", mounts, "sh", str(tmp_path))
    body = """
    try:
        open("file", "w")
    except OSError:
        print([x.numel() for x in launch(lambda: torch.ones(50_000_000)).results], launch(total).results, "right")
    """
    ends_right(script(body, prefix), "[50000000, 50000000] [2.0, 2.0] right")


def test_no_room_in_the_temporary_folder_and_no_working_directory(tmp_path) -> None:
    prefix = (*unshared("-m"), "sh", "-c", 'mount -t tmpfs -o size=8m none /tmp && exec "$@"', "sh")
    body = """
    def tried(*arguments):
        try:
            launch(*arguments)
        except (LaunchError, ValueError) as error:
            print(type(error).__name__, error)
    os.mkdir("/tmp/gone")
    tried(lambda: torch.ones(50_000_000))
    tried(total, 400)
    tried(lambda x: None, 2, (torch.ones(5_000_000),))
    os.chdir("/tmp/gone")
    os.rmdir("/tmp/gone")
    tried(total)
    os.chdir("/")
    print(launch(total).results, "right")
    """
    out = ends_right(script(body, prefix, TMPDIR="/tmp"), "[2.0, 2.0] right")
    assert re.search(r"LaunchError Rank \d raised OSError: the result could not be written", out)
    assert out.count("UsageError A launch needs room for temporary files") == 2
    assert "UsageError The folder that this notebook runs in has been deleted or moved" in out


def test_a_forkserver_that_was_killed_is_replaced() -> None:
    launch(sum_of_ranks)
    for process in psutil.Process().children():
        if "multiprocessing.forkserver" in " ".join(process.cmdline()):
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:  # multiprocessing itself waits for it
                time.sleep(0.01)
    assert launch(sum_of_ranks).results == [1.0, 1.0]  # its folder is a new one, and stays
    with nothing_left():
        assert launch(sum_of_ranks).results == [1.0, 1.0]


# Again and again


def test_300_launches_in_a_row() -> None:
    def rank() -> int:
        return dist.get_rank()

    this = psutil.Process()

    def measured() -> tuple[int, int, int, int]:
        return this.num_fds(), this.num_threads(), len(this.children(recursive=True)), this.memory_info().rss

    with nothing_left():
        for _ in range(20):
            launch(rank, 2)
        before = measured()
        for _ in range(280):
            assert launch(rank, 2).results == [0, 1]
        after = measured()
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2]
    assert after[3] - before[3] < 8 << 20, "memory grew"


def test_failing_launches_leave_nothing_either() -> None:
    this = psutil.Process()

    def fails() -> None:
        raise ValueError

    def once() -> None:
        with pytest.raises(LaunchError):
            launch(fails, 2)

    with nothing_left():
        once()
        before = this.num_fds()
        for _ in range(10):
            once()
        assert this.num_fds() <= before

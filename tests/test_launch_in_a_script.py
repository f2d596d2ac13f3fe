"""Interrupts, kills and two notebooks at once: a script's process stands for a kernel."""

from __future__ import annotations

import os
import signal
import sys
import time

import cloudpickle
import psutil
import pytest

from launching import descendants
from scripts import ends_right, gone, script, wait_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# A script's process stands for a kernel: what matters is what happens around it


def test_interrupt() -> None:
    """SIGINT to the whole process group, as Jupyter does, again and again while the ranks are being ended."""
    mark = f"interrupt {os.getpid()}"
    body = """
    signal.signal(signal.SIGINT, lambda number, frame: None)  # or what comes after the launch would end the script
    try:
        launch(waits, 3, timeout=600)
    except LaunchError as error:
        print(error.kind, error)
    time.sleep(1)
    print(launch(total).results, "right")
    """
    process = script(body, SHARDLAB_TEST_PROCESS=mark)
    wait_for(process, "running")
    time.sleep(0.5)
    began = time.monotonic()
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    wait_for(process, "interrupted")
    assert time.monotonic() - began < 5
    out = ends_right(process)
    assert "rank 0 was computing" in out and "<string>, line" in out
    assert "[2.0, 2.0] right" in out
    gone(mark)


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_interrupt_while_starting(after: float) -> None:
    mark = f"starting {os.getpid()} {after}"
    body = """
    print("starting")
    try:
        launch(waits, 16, timeout=600)
    except LaunchError as error:
        print(error.kind, "so")
    except KeyboardInterrupt:
        print("interrupted so")
    print(launch(total).results, "right")
    """
    process = script(body, SHARDLAB_TEST_PROCESS=mark)
    wait_for(process, "starting")
    time.sleep(after)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process, "interrupted so")
    assert time.monotonic() - began < 5
    ends_right(process)
    gone(mark)


def test_a_killed_notebook_takes_everything_with_it(tmp_path) -> None:
    """Also what a rank has started, and although a process forked from the notebook holds copies of its pipes."""
    mark = f"killed {os.getpid()}"
    body = """
    def with_children():
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        open(f"begun-{dist.get_rank()}", "w").close()
        waits()
    threading.Thread(target=lambda: launch(with_children, 3, timeout=600)).start()
    while len(os.listdir()) < 3:
        time.sleep(0.05)
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    print("forked", forked, "end", flush=True)
    """
    process = script(body, cwd=str(tmp_path), SHARDLAB_TEST_PROCESS=mark)
    forked = int(wait_for(process, "forked").split()[1])
    own = {forked, process.pid, *(child.pid for child in psutil.Process(process.pid).children())}
    ranks = [each for each in descendants(mark, servers=True) if each.pid not in own]
    assert len(ranks) >= 6  # three ranks and what they started
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    os.kill(forked, signal.SIGKILL)  # the forkserver's pipe is one of those that it holds
    assert not alive
    gone(mark)


def test_a_notebook_that_exits_while_a_thread_launches() -> None:
    mark = f"exit {os.getpid()}"
    process = script(
        "threading.Thread(target=lambda: launch(waits, 2), daemon=True).start(); time.sleep(6); print('right')",
        SHARDLAB_TEST_PROCESS=mark,
    )
    process.communicate(timeout=60)
    gone(mark)


def test_two_notebooks_at_the_same_time() -> None:
    body = "for _ in range(5): assert launch(total, 3).results == [3.0] * 3\nprint('right')"
    processes = [script(body) for _ in range(2)]
    for process in processes:
        ends_right(process)

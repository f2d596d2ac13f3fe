"""Devices: what a learner sees when a thread raises, hangs or ends the process, and what is printed."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

from shardlab.devices import launch_devices, on
from shardlab.errors import LaunchError, UsageError


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def failure(fn, timeout=20.0) -> LaunchError:
    with pytest.raises(LaunchError) as failed:
        launch_devices(fn, 2, device="cpu", timeout=timeout)
    assert "rank" not in str(failed.value).lower(), str(failed.value)
    return failed.value


def test_an_exception_of_a_thread_that_nobody_caught_ends_the_launch(capfd):
    def work(devices):
        results = []

        def thread():
            results.append(torch.ones(2) + torch.ones(3))

        in_a_thread(thread)
        return results[0]  # raises too, but only because of the first

    error = failure(work)
    assert (error.kind, error.exception_type) == ("raised", "RuntimeError")
    assert "The size of tensor a (2)" in str(error) and "results.append" in str(error)
    assert "IndexError" not in str(error) and capfd.readouterr().err == ""


def test_an_exception_of_a_thread_counts_also_when_the_function_returns():
    def work(devices):
        in_a_thread(lambda: {}["missing"])
        return "all is well"

    assert failure(work).exception_type == "KeyError"


def test_mixing_devices_names_the_learners_line():
    def work(devices):
        return torch.ones(2).to(devices[1]) + torch.ones(2).to(devices[0])

    text = str(failure(work))
    assert text.startswith("The process raised RuntimeError: Expected all tensors to be on the same device")
    assert "torch.ones(2).to(devices[1]) +" in text and "eval_frame" not in text


def test_a_thread_that_never_ends_is_named_by_its_own_line():
    def work(devices):
        def spin():
            while True:
                time.sleep(0.01)  # the thread's line

        in_a_thread(spin)

    error = failure(work, timeout=1.5)
    assert error.kind == "timeout" and "# the thread's line" in str(error) and "no operation of torch" in str(error)


def test_a_thread_that_ends_the_process_is_reported():
    def work(devices):
        in_a_thread(lambda: os._exit(3))

    error = failure(work)
    assert error.kind == "died" and "exit code 3" in str(error)


def test_work_of_threads_counts_as_movement():
    def work(devices):
        def busy():
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                torch.ones(2).add_(1)

        in_a_thread(busy)
        return "done"

    assert launch_devices(work, 2, device="cpu", timeout=1.5).results == ["done"]


def test_what_is_printed_says_which_device(capfd):
    def work(devices):
        print("from the function")

        def thread():
            with on(devices[1]):
                print("two", "words")
                print("to stderr", file=sys.stderr)

        in_a_thread(thread)
        print("no end of line", end="")

    launch_devices(work, 2, device="cpu")
    out, err = capfd.readouterr()
    assert out.splitlines() == ["from the function", "[device 1] two words", "[device 1] to stderr", "no end of line"]
    assert err == ""


def test_wrong_arguments_are_told_in_one_line():
    for wrong, words in (
        (lambda: launch_devices(lambda d: 1, 0), "from 1 to"),
        (lambda: launch_devices(lambda d: 1, "2"), "number of devices"),
        (lambda: launch_devices(lambda d: 1, 2, device="gpu"), '"auto", "cpu" or "cuda"'),
        (lambda: launch_devices(lambda: 1, 2, device="cpu"), "cannot be called with"),
        (lambda: launch_devices(lambda d: 1, 2, args=5, device="cpu"), "args is a tuple"),
        (lambda: launch_devices(3, 2, device="cpu"), "needs a function"),
    ):
        with pytest.raises(UsageError, match=words) as failed:
            wrong()
        assert "\n" not in str(failed.value)
    if torch.cuda.device_count() < 2:
        with pytest.raises(UsageError, match="need 2 GPUs"):
            launch_devices(lambda d: 1, 2, device="cuda")


def test_what_cannot_travel_is_named():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="'lock', a lock, cannot be sent to the process .* Create it inside"):
        launch_devices(lambda devices: lock, 2, device="cpu")
    assert "returned a lock" in str(failure(lambda devices: threading.Lock()))

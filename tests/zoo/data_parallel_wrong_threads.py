"""Lab 02: DataParallel with wrong threads, outputs and manners."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from shardlab import move, on

from . import wrong
from .data_parallel_plain import Plain


class _Threads(Plain):
    """Threads that are started by hand."""

    def started(self, work, count, results):
        def run(i):
            with on(self.devices[i]):
                results[i] = work(i)

        return [threading.Thread(target=run, args=(i,)) for i in range(count)]


@wrong("02.DataParallel", reason="order", says="one replica at a time in forward.*\n.*\n.*join")
class OneAfterTheOther(_Threads):
    """join() right after start()."""

    def parallel(self, work, count):
        results = {}
        for thread in self.started(work, count, results):
            thread.start()
            thread.join()
        return [results[i] for i in range(count)]


@wrong("02.DataParallel", reason="order", says="one replica at a time in forward")
class NoThreads(Plain):
    """A loop."""

    def parallel(self, work, count):
        results = []
        for i in range(count):
            with on(self.devices[i]):
                results.append(work(i))
        return results


@wrong("02.DataParallel", reason="order", says="2 replicas at the same time")
class PoolOfTwo(Plain):
    """A pool that is too small."""

    def parallel(self, work, count):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, range(count)))


@wrong("02.DataParallel", reason="order", says="one replica at a time in forward")
class OneLock(Plain):
    """A lock around all that a thread does."""

    def parallel(self, work, count):
        lock = threading.Lock()

        def alone(i):
            with lock:
                return work(i)

        return super().parallel(alone, count)


@wrong("02.DataParallel", reason="order", says="one replica at a time in backward.*\n.*\n.*backward")
class BackwardInALoop(Plain):
    """Forward in threads, backward after them."""

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        ys = self.scatter(targets)
        replicas = self.replicas(len(xs))

        def work(i):
            return loss_function(replicas[i](xs[i]), ys[i]) * (len(xs[i]) / len(inputs))

        losses = self.parallel(work, len(xs))
        for loss in losses:
            loss.backward()
        self.collect(replicas)
        return self.total([loss.detach() for loss in losses])


@wrong("02.DataParallel", reason="order", says="one replica at a time in backward")
class LossOnDeviceZero(Plain):
    """Gathers the outputs, takes the loss on device 0 and lets one backward go through all devices."""

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        replicas = self.replicas(len(xs))
        outputs = self.parallel(lambda i: replicas[i](xs[i]), len(xs))
        loss = loss_function(torch.cat([move(one, self.devices[0]) for one in outputs]), targets)
        loss.backward()
        self.collect(replicas)
        return loss.detach()


@wrong(
    "02.DataParallel",
    reason="values",
    says="device 2 is done first.*order of samples 4, 5, 2, 3, 0, 1.*\n.*\n.*who is done first",
)
class AsTheyCome(Plain):
    """Appends to one list, in the order in which threads are done."""

    def parallel(self, work, count):
        results = []

        def run(i):
            result = work(i)
            results.append(result)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if len(results) < count:
            raise ValueError("nothing but negative numbers")
        return results


@wrong("02.DataParallel", reason="values", says="order of samples")
class FromAQueue(Plain):
    """A queue gives results in the order of completion."""

    def parallel(self, work, count):
        done = queue.Queue()

        def run(i):
            try:
                done.put((work(i), None))
            except Exception as error:
                done.put((None, error))

        for i in range(count):
            threading.Thread(target=run, args=(i,)).start()
        results = [done.get() for _ in range(count)]
        for _, error in results:
            if error:
                raise error
        return [result for result, _ in results]


@wrong("02.DataParallel", reason="crash", says="the caller saw (IndexError|KeyError|TypeError)")
class NotCaught(_Threads):
    """What a thread raises ends the thread, and nobody else hears of it."""

    def parallel(self, work, count):
        results = {}
        threads = self.started(work, count, results)
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return [results[i] for i in range(count)]


@wrong("02.DataParallel", reason="crash", says="the caller saw nothing of it")
class CarriesOn(Plain):
    """Leaves out the device that failed."""

    def parallel(self, work, count):
        def careful(i):
            try:
                return work(i)
            except Exception as error:
                print("device", i, "failed:", error)

        return [result for result in super().parallel(careful, count) if result is not None]


@wrong("02.DataParallel", reason="crash", says="the caller saw")
class RaisesAnother(Plain):
    """Tells that something went wrong, but not what."""

    def parallel(self, work, count):
        try:
            return super().parallel(work, count)
        except Exception:
            failed = True
        if failed:
            raise RuntimeError("a thread failed")


@wrong("02.DataParallel", reason="hang", says="nothing has moved", patience=1.5)
class WaitsForAll(Plain):
    """A barrier for N threads, where only some devices have samples."""

    def parallel(self, work, count):
        barrier = threading.Barrier(len(self.devices))

        def meet(i):
            result = work(i)
            barrier.wait()
            return result

        return super().parallel(meet, count)


@wrong("02.DataParallel", reason="hang", says="nothing has moved", patience=1.5)
class WaitsForNobody(Plain):
    """Waits for one result more than there are."""

    def parallel(self, work, count):
        done = queue.Queue()
        results = super().parallel(work, count)
        [done.put(result) for result in results]
        return [done.get() for _ in range(count + 1)]

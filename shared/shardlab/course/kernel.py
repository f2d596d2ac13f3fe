"""The kernel that runs the course's notebooks: this very interpreter, whatever kernels the person has installed.

Kernels found by name ("python3") may belong to another environment, and a person's IPython profile may change what a
cell prints. Both would make an executed notebook depend on who built it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardlab.course.find import need
from shardlab.ledger import VARIABLE


def kernel_environment(home: Path, ipython: str, ledger: Path) -> dict[str, str]:
    """Variables a kernel of the course gets: where the course is, this same package, an empty IPython profile, and a
    ledger that is not the learner's."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {"SHARDLAB_HOME": str(home), "PYTHONPATH": path, "IPYTHONDIR": ipython, VARIABLE: str(ledger)}


@contextmanager
def this_interpreter(home: Path, ledger: Path) -> Iterator[type]:
    """A kernel manager class, for nbclient and papermill alike, whose kernels all run `sys.executable`.

    ledger: the file that keeps the rows which labs record.
    """
    manager = need("jupyter_client.manager", "running a notebook")
    kernelspec = need("jupyter_client.kernelspec", "running a notebook")
    need("ipykernel", "running a notebook")
    with tempfile.TemporaryDirectory(prefix="shardlab-ipython-") as ipython:
        environment = kernel_environment(home, ipython, ledger)

        class Specs(kernelspec.KernelSpecManager):  # type: ignore[misc,name-defined]
            def get_kernel_spec(self, kernel_name: str) -> Any:
                return kernelspec.KernelSpec(
                    argv=[sys.executable, "-m", "ipykernel_launcher", "--log-level=ERROR", "-f", "{connection_file}"],
                    display_name="Python 3",
                    language="python",
                    env=environment,
                )

        class Manager(manager.AsyncKernelManager):  # type: ignore[misc,name-defined]
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.kernel_spec_manager = Specs()

        yield Manager

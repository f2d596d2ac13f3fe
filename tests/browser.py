"""A real JupyterLab and a real Chromium, for tests: started here, ended here, and nothing leaves the machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from uuid import uuid4

import psutil

ROOT = Path(__file__).parent.parent
SCREENSHOTS = ROOT / "out" / "browser"
TOKEN = "only-for-this-test"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
LOCAL = {"127.0.0.1", "localhost", "::1"}

# What JupyterLab itself writes to the console as an error, with the reason why it is harmless here. Matched as a part
# of the message. Nothing of ours may be added.
HARMLESS: dict[str, str] = {}


def chromium() -> str | None:
    return os.environ.get("SHARDLAB_CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


@dataclass
class Lab:
    """A running JupyterLab that serves `folder`."""

    url: str
    folder: Path

    def page(self, notebook: str) -> str:
        # A workspace of its own, or JupyterLab opens what an earlier page had open too.
        return f"{self.url}/lab/workspaces/{uuid4().hex}/tree/{notebook}?token={TOKEN}"


@contextmanager
def jupyterlab(folder: Path, home: Path, dark: bool = False) -> Iterator[Lab]:
    """JupyterLab on a free port with settings, data and runtime folders of its own, under `home`."""
    _write_settings(home / "lab-settings", dark)
    port = _free_port()
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "lab-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "shared"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"),
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]
    log = home / "jupyterlab.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=folder, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server, log)
        yield Lab(url, folder)
    finally:
        end_with_children(server.pid)
        server.wait(10)


def trust(folder: Path, home: Path) -> None:
    """Marks the notebooks of a folder as trusted, for the JupyterLab that lives under `home`."""
    notebooks = sorted(map(str, folder.glob("*.ipynb")))
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data")}
    subprocess.run([sys.executable, "-m", "jupyter", "trust", *notebooks], env=env, check=True, capture_output=True)


def end_with_children(pid: int, patience: float = 5) -> None:
    """Ends a process and all it started, by their ids: first asked, then made to."""
    try:
        parent = psutil.Process(pid)
        processes = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=patience)


@dataclass
class Watch:
    """What a page wrote to the console and asked from the network."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def own_errors(self) -> list[str]:
        return [error for error in self.errors if not any(known in error for known in HARMLESS)]

    @property
    def left_the_machine(self) -> list[str]:
        return [url for url in self.requests if not _is_local(url)]


@contextmanager
def browser_page(profile: Path, **context_options: Any) -> Iterator[tuple[Any, Watch]]:
    """A page of a fresh Chromium, and the watch over it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=chromium(),
            headless=True,
            args=CHROMIUM_FLAGS,
            viewport={"width": 1400, "height": 1000},
            **context_options,
        )
        try:
            page = context.new_page()
            watch = Watch()
            page.on("console", lambda message: message.type == "error" and watch.errors.append(message.text))
            page.on("pageerror", lambda error: watch.errors.append(str(error)))
            page.on("request", lambda request: watch.requests.append(request.url))
            page.on("websocket", lambda socket: watch.requests.append(socket.url))
            yield page, watch
        finally:
            context.close()


def _is_local(url: str) -> bool:
    parts = urlparse(url)
    return parts.scheme in {"data", "blob", "about", "file"} or parts.hostname in LOCAL


def _write_settings(folder: Path, dark: bool) -> None:
    """JupyterLab's own settings: no news, no update check, the theme."""
    settings = {
        "apputils-extension/notification.jupyterlab-settings": {
            "fetchNews": "false",
            "checkForUpdates": False,
            "doNotDisturbMode": True,
        },
        "apputils-extension/themes.jupyterlab-settings": {
            "theme": "JupyterLab Dark" if dark else "JupyterLab Light",
            "adaptive-theme": False,
        },
        # All cells are drawn at once, or a test has to scroll to find one.
        "notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    }
    for name, values in settings.items():
        path = folder / "@jupyterlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(url: str, server: subprocess.Popen, log: Path, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended at once:\n{log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(f"{url}/api", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within {patience:.0f} s:\n{log.read_text()[-2000:]}")

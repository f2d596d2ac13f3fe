"""Widgets in saved notebooks and exported pages, where no kernel and perhaps no network is there.

What others do with a saved widget (read in the sources of jupyterlab-manager 3.0.17 and nbconvert 7.17):
JupyterLab shows "model not found" for a widget view whose model is gone. nbconvert draws a widget view only if the
notebook holds the widget's state, and then with code from a content delivery network; without state it takes
text/html, and only after that image/svg+xml. GitHub uses nbconvert too, removes scripts, and puts image/svg+xml on the
page with everything but plain shapes and attributes taken out (nbconvert pull request 2106, nbviewer issue 1037).
So our widgets carry three forms: the live view, text/html that is live without kernel and network, and a picture; and
`without_views` keeps of them what suits the place where a notebook will be read.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
EXPORT_LINE = "export default { render };"

# What anywidget's model offers, without a kernel behind it.
MOUNT = """
const values = %(values)s;
for (const place of document.querySelectorAll('[data-shardlab="%(name)s"]:not([data-live])')) {
  place.dataset.live = "yes";
  const state = { ...values }, listeners = [];
  const model = {
    get: (key) => state[key],
    set: (key, value) => { state[key] = value; },
    save_changes: () => listeners.forEach((listener) => listener()),
    on: (event, listener) => listeners.push(listener),
    off: () => {},
  };
  place.replaceChildren();
  render({ model, el: place });
}
"""


def live_html(script: str, values: dict[str, Any], picture: str) -> str:
    """A piece of HTML that shows `picture`, and the live drawing instead wherever scripts run.

    script: the widget's module, ending in `export default { render };`. values: its traits.
    The same widget always gives the same text.
    """
    # "<" inside strings could end the script element early.
    encoded = json.dumps(values, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")
    name = sha256((script + encoded).encode()).hexdigest()[:12]
    if EXPORT_LINE not in script:
        raise ValueError(f"the widget's script must end in {EXPORT_LINE!r}")
    module = script.replace(EXPORT_LINE, MOUNT % {"values": encoded, "name": name})
    return f'<div data-shardlab="{name}">{picture}</div>\n<script type="module">\n{module}</script>'


def without_views(notebook: dict[str, Any], *, scripts: bool = False) -> dict[str, Any]:
    """Changes an executed notebook (nbformat dict) for reading without a kernel, and returns it.

    Widget views that have another form go, and so does all widget state. scripts=False is for GitHub: what is live by
    a script goes too when there is a picture. scripts=True is for HTML pages, which then need no network.
    """
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if VIEW in data and ("text/html" in data or "image/svg+xml" in data):
                del data[VIEW]
            if not scripts and "image/svg+xml" in data and "data-shardlab" in "".join(data.get("text/html", "")):
                del data["text/html"]
    notebook["metadata"].pop("widgets", None)
    return notebook

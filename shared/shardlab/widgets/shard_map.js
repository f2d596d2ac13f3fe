// The controls around a shard map: buttons, slider, keys, what happened in words, and the event shared by all views.
// shard_map_replay.js and shard_map_drawing.js come before this text. The model offers get, set, save_changes, on and
// off, as anywidget's does.

const STYLE = `
.sl-map { --sl-ink: var(--jp-ui-font-color0, #111); --sl-dim: var(--jp-ui-font-color2, #5f5f5f);
  --sl-page: var(--jp-layout-color0, #fff); --sl-raised: var(--jp-layout-color2, #eee);
  --sl-line: var(--jp-border-color0, #999); --sl-accent: var(--jp-brand-color1, #1976d2); --sl-wrong: #c4003f;
  color: var(--sl-ink); background: var(--sl-page); font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif);
  padding: 10px; border: 1px solid var(--sl-line); border-radius: 6px; max-width: 960px; box-sizing: border-box; }
.sl-map:focus-visible { outline: 3px solid var(--sl-accent); outline-offset: -3px; }
.sl-map :is(button, input):focus-visible { outline: 3px solid var(--sl-accent); outline-offset: 2px; }
.sl-map p { margin: 0; }
.sl-map .sl-title { font-weight: 600; }
.sl-map .sl-alarm { border-left: 4px solid var(--sl-wrong); padding-left: 8px; font-weight: 600; }
.sl-map .sl-controls { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin: 6px 0; }
.sl-map button { color: inherit; background: var(--sl-raised); border: 1px solid var(--sl-line); border-radius: 4px;
  min-width: 34px; min-height: 28px; padding: 2px 8px; font: inherit; cursor: pointer; }
.sl-map button[aria-disabled="true"] { opacity: .45; cursor: default; }
.sl-map input[type=range] { flex: 1 1 160px; accent-color: var(--sl-accent); }
.sl-map .sl-count { font-variant-numeric: tabular-nums; min-width: 8em; }
.sl-map .sl-caption { min-height: 2.9em; }
.sl-map .sl-caption b { font-weight: 600; }
.sl-map .sl-pointed { min-height: 1.45em; color: var(--sl-dim); }
.sl-map svg { display: block; }
.sl-map svg text { fill: var(--sl-ink); font-size: 11px; }
.sl-map svg :is(.sl-layer, .sl-sign, .sl-share) { font-size: 10.5px; }
.sl-map svg .sl-layer { fill: var(--sl-dim); }
.sl-map svg .sl-rank { text-anchor: middle; font-weight: 600; }
.sl-map svg .sl-digit { text-anchor: middle; font-size: 10px; paint-order: stroke; stroke-width: 3px; }
.sl-map svg .sl-sign { text-anchor: end; }
.sl-map svg .sl-share { font-variant-numeric: tabular-nums; }
.sl-map svg .sl-wrong { font-weight: 700; }
.sl-map svg .sl-empty { fill: none; stroke: var(--sl-line); stroke-width: .6; }
.sl-map svg .sl-grid { stroke: var(--sl-line); stroke-width: .6; stroke-dasharray: 2 3; fill: none; }
.sl-map svg .sl-flying { stroke: #000; stroke-width: 1.2; fill: none; }
.sl-map svg .sl-stripe-dark { stroke: #000; fill: none; }
.sl-map svg .sl-stripe-light { stroke: #fff; fill: none; }
.sl-map svg .sl-changed { fill: var(--sl-accent); }
.sl-map svg .sl-left-over { fill: none; stroke: var(--sl-wrong); stroke-width: 1.8; }
.sl-map svg .sl-over-hatch { stroke: var(--sl-wrong); stroke-width: 1.4; fill: none; }
.sl-map svg .sl-bytes { stroke: var(--sl-line); stroke-width: .8; }
.sl-map svg .sl-beyond { fill: none; stroke: var(--sl-ink); stroke-width: 1.8; }
.sl-map svg .sl-formula { fill: var(--sl-ink); }
.sl-map svg .sl-most { stroke: var(--sl-dim); stroke-width: 1; stroke-dasharray: 2 2; fill: none; }
.sl-map .sl-legend { color: var(--sl-dim); margin: 6px 0 0; font-size: 12px; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: center; }
.sl-map .sl-legend svg { display: inline-block; vertical-align: -2px; margin-right: 5px; }
`;

const SECONDS_PER_EVENT = 0.35, FAR = 10;

function html(parent, name, attributes = {}, text = null) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function legend(parent, data, looks) {
  const swatch = (draw, words) => {
    const ink = pen();
    draw(ink);
    html(parent, "span").innerHTML = `<svg width="24" height="13">${ink.out()}</svg>${escapeText(words)}`;
  };
  const box = (look) => (ink) => ink.box(look, 1, 1, 21, 11);
  html(parent, "span", {}, data.kinds.map(({ sign, name }) => `${sign} ${name}`).join(", "));
  swatch((ink) => { ink.box(looks[0].fill, 1, 1, 21, 11); ink.text("sl-digit", 11, 10, "0", looks[0].text); }, "colour and number: who owns it");
  if (data.owners.some((value, i) => i % 2 && value < 0)) swatch(box("#BDBDBD"), "nobody's own");
  swatch((ink) => { ink.box("#BDBDBD", 1, 1, 21, 11); ink.hatch("sl-flying", 1, 1, 21, 11); }, "in flight");
  swatch((ink) => ink.box("sl-changed", 1, 6, 21, 2), "changed now");
  swatch(box("sl-left-over"), "left over after the step");
  ["weights", "gradients", "optimizer"].forEach((name, part) => swatch(box(`sl-bytes sl-part-${part}`), `bytes of ${name}`));
  swatch((ink) => ink.box("sl-formula", 11, 0, 2, 13), `formula, ${data.formula_text}`);
  swatch((ink) => { ink.box("sl-bytes sl-part-2", 1, 2, 21, 9); ink.box("sl-beyond", 1, 2, 21, 9); }, "over the formula for now");
  swatch((ink) => ink.line("sl-most", 11, 0, 11, 13), "most in this step");
  html(parent, "span", {}, `Keys: ← → event by event, Page Up and Page Down by ${FAR}, Home and End, space plays.`);
}

function render({ model, el }) {
  const data = model.get("data"), looks = model.get("looks"), replay = replayOf(data), last = data.frames.length - 1;
  let timer = null, width = 900, pointed = null;

  // JupyterLab listens to keys before the page does; this attribute tells it that the keys here are ours.
  const root = html(el, "div", {
    class: "sl-map", tabindex: "0", role: "group", "data-lm-suppress-shortcuts": "true", "aria-roledescription": "shard map",
    "aria-label": `${data.title}, event by event. Left and right arrow keys step, Home and End jump, space plays.`,
  });
  const fills = data.fills.map((fill, part) => `.sl-map svg .sl-part-${part} { fill: ${fill}; }`).join("\n");
  html(root, "style", {}, STYLE + fills);
  html(root, "p", { class: "sl-title" }, data.title);
  html(root, "p", {}, data.summary);
  if (data.wrong.length) html(root, "p", { class: "sl-alarm" }, `! ${data.wrong.join("; ")}`);
  const controls = html(root, "div", { class: "sl-controls" });
  const button = (label, sign, action) => {
    const node = html(controls, "button", { type: "button", "aria-label": label, title: label }, sign);
    node.addEventListener("click", () => node.getAttribute("aria-disabled") !== "true" && action());
    return node;
  };
  const first = button("first event", "|◀", () => walk(0));
  const previous = button("previous event", "◀", () => walk(step() - 1));
  const play = button("play", "▶ play", () => (timer ? stop() : start()));
  const next = button("next event", "▶", () => walk(step() + 1));
  const end = button("last event", "▶|", () => walk(last));
  const slider = html(controls, "input", { type: "range", min: 0, max: last, step: 1, "aria-label": "event" });
  const count = html(controls, "span", { class: "sl-count" });
  const caption = html(root, "p", { class: "sl-caption", "aria-live": "polite" });
  const stage = html(root, "div", { class: "sl-stage" });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("role", "img");
  stage.appendChild(svg);
  const hint = html(root, "p", { class: "sl-pointed" });
  legend(html(root, "div", { class: "sl-legend" }), data, looks);

  const step = () => Math.max(0, Math.min(last, model.get("step")));

  function go(target) {
    const wanted = Math.max(0, Math.min(last, target));
    if (wanted === model.get("step")) return;
    model.set("step", wanted);
    model.save_changes();
  }

  function walk(target) {
    stop();
    go(target);
  }

  function start() {
    if (last === 0) return;
    if (step() === last) go(0);
    caption.setAttribute("aria-live", "off"); // nobody can listen that fast
    timer = setInterval(() => { go(step() + 1); if (step() === last) stop(); }, SECONDS_PER_EVENT * 1000);
    controlsFor(step());
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    caption.setAttribute("aria-live", "polite");
    controlsFor(step());
  }

  function controlsFor(at) {
    // aria-disabled keeps the focus where it is; a disabled button would drop it.
    for (const node of [first, previous]) node.setAttribute("aria-disabled", String(at === 0));
    for (const node of [next, end]) node.setAttribute("aria-disabled", String(at === last));
    play.textContent = timer ? "❚❚ pause" : "▶ play";
    for (const name of ["aria-label", "title"]) play.setAttribute(name, timer ? "pause" : "play");
  }

  function draw() {
    const at = step(), [what] = data.frames[at];
    replay.goTo(at);
    slider.value = at;
    slider.setAttribute("aria-valuetext", what);
    count.textContent = `event ${at} of ${last}`;
    const changes = changesInWords(data, replay);
    caption.replaceChildren();
    html(caption, "b", {}, `${what}. `);
    caption.append(changes ? `${changes}.` : at ? "Nothing changes." : "");
    svg.setAttribute("aria-label", pictureInWords(data, replay));
    svg.setAttribute("width", width);
    svg.setAttribute("height", heightOf(data));
    svg.innerHTML = drawMap(data, looks, replay, at, width);
    root.dataset.step = at;
    point();
    controlsFor(at);
  }

  function point() {
    const text = pointed ? elementInWords(data, replay, pointed.rank, pointed.kind, pointed.element) : "Point at the map to see which parameter it is.";
    if (hint.textContent !== text) hint.textContent = text;
  }

  slider.addEventListener("input", () => walk(Number(slider.value)));
  stage.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    pointed = placeAt(data, width, event.clientX - box.left, event.clientY - box.top);
    point();
  });
  stage.addEventListener("pointerleave", () => { pointed = null; point(); });
  root.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const onButton = event.target instanceof HTMLButtonElement;
    const actions = {
      ArrowLeft: () => walk(step() - 1), ArrowRight: () => walk(step() + 1),
      PageUp: () => walk(step() - FAR), PageDown: () => walk(step() + FAR), Home: () => walk(0), End: () => walk(last),
      " ": onButton ? null : () => (timer ? stop() : start()), // on a button, space presses it
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
  const resize = new ResizeObserver(() => {
    const wanted = Math.max(480, Math.floor(stage.clientWidth));
    if (stage.clientWidth && wanted !== width) { width = wanted; draw(); }
  });
  resize.observe(stage);
  width = Math.max(480, Math.floor(stage.clientWidth) || 900);
  model.on("change:step", draw);
  draw();
  return () => { clearInterval(timer); resize.disconnect(); model.off("change:step", draw); };
}

export default { render };

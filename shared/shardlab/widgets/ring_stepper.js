// The controls around the drawing: buttons, slider, keys, the caption, and the step shared by all views of a widget.
// ring_drawing.js comes before this text. The model offers get, set, save_changes, on and off, as anywidget's does.

const STYLE = `
.sl-ring { --sl-ink: var(--jp-ui-font-color0, #111); --sl-dim: var(--jp-ui-font-color2, #5f5f5f);
  --sl-page: var(--jp-layout-color0, #fff); --sl-raised: var(--jp-layout-color2, #eee);
  --sl-line: var(--jp-border-color0, #999); --sl-accent: var(--jp-brand-color1, #1976d2);
  --sl-wrong: #c4003f; --sl-done: #00734f;
  color: var(--sl-ink); background: var(--sl-page); font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif);
  padding: 10px; border: 1px solid var(--sl-line); border-radius: 6px; max-width: 1400px; box-sizing: border-box; }
.sl-ring:focus-visible, .sl-ring button:focus-visible, .sl-ring input:focus-visible {
  outline: 3px solid var(--sl-accent); outline-offset: 2px; }
.sl-ring:focus-visible { outline-offset: -3px; } /* a notebook's output area would cut it off */
.sl-ring .sl-title { font-weight: 600; margin: 0 0 6px; }
.sl-ring .sl-controls { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 6px; }
.sl-ring button { color: inherit; background: var(--sl-raised); border: 1px solid var(--sl-line); border-radius: 4px;
  min-width: 34px; min-height: 28px; padding: 2px 8px; font: inherit; cursor: pointer; }
.sl-ring button[aria-disabled="true"] { opacity: .45; cursor: default; }
.sl-ring input[type=range] { flex: 1 1 120px; max-width: 320px; accent-color: var(--sl-accent); }
.sl-ring .sl-count { font-variant-numeric: tabular-nums; min-width: 8em; }
.sl-ring .sl-caption { min-height: 3em; margin: 4px 0 6px; }
.sl-ring .sl-caption.sl-alarm { border-left: 4px solid var(--sl-wrong); padding-left: 8px; }
.sl-ring .sl-stage { overflow-x: auto; }
.sl-ring svg { display: block; width: 100%; height: auto; }
.sl-ring svg text { fill: var(--sl-ink); font-size: 11px; }
.sl-ring svg .sl-head, .sl-ring svg .sl-state, .sl-ring svg .sl-digit, .sl-ring svg .sl-rank { text-anchor: middle; }
.sl-ring svg .sl-head { fill: var(--sl-dim); }
.sl-ring svg .sl-rank { font-weight: 600; font-size: 12px; }
.sl-ring svg .sl-note { font-size: 10px; paint-order: stroke; stroke: var(--sl-page); stroke-width: 3px; stroke-linejoin: round; }
.sl-ring svg .sl-sent { fill: var(--sl-dim); }
.sl-ring svg .sl-faint { fill: var(--sl-dim); }
.sl-ring svg .sl-box { fill: var(--sl-page); stroke: var(--sl-line); stroke-width: 1; }
.sl-ring svg .sl-around { fill: none; stroke: var(--sl-ink); stroke-width: 2; }
.sl-ring svg .sl-segment { stroke: var(--sl-ink); stroke-width: .8; }
.sl-ring svg .sl-empty { stroke: var(--sl-line); stroke-dasharray: 2 2; }
.sl-ring svg .sl-shaft { stroke: var(--sl-ink); stroke-width: 1; stroke-linejoin: round; }
.sl-ring svg .sl-curve { fill: none; stroke-width: 3; }
.sl-ring svg .sl-curve-under { stroke: var(--sl-ink); stroke-width: 5; }
.sl-ring svg .sl-complete .sl-box { stroke: var(--sl-done); stroke-width: 2; }
.sl-ring svg .sl-complete .sl-badge { fill: var(--sl-done); }
.sl-ring svg :is(.sl-repeated, .sl-garbage, .sl-missing) .sl-box { stroke: var(--sl-wrong); stroke-width: 2.5; stroke-dasharray: 6 2; }
.sl-ring svg :is(.sl-repeated, .sl-garbage, .sl-missing) .sl-badge { fill: var(--sl-wrong); }
.sl-ring svg :is(.sl-complete, .sl-repeated, .sl-garbage, .sl-missing) .sl-state { fill: #fff; font-weight: 600; }
.sl-ring svg .sl-twice { fill: none; stroke: var(--sl-wrong); stroke-width: 2.5; }
.sl-ring svg .sl-hatch { stroke: var(--sl-wrong); stroke-width: 2; fill: none; }
.sl-ring svg .sl-unset { stroke: var(--sl-line); stroke-width: .7; }
.sl-ring svg .sl-thin { stroke-width: 1; }
.sl-ring svg .sl-question { font-size: 20px; font-weight: 700; text-anchor: middle; paint-order: stroke; stroke: var(--sl-page); stroke-width: 5px; }
.sl-ring svg .sl-arrow { animation: sl-appear .25s ease-out; }
@keyframes sl-appear { from { opacity: 0; } to { opacity: 1; } }
@media (prefers-reduced-motion: reduce) { .sl-ring svg .sl-arrow { animation: none; } }
.sl-ring .sl-legend { color: var(--sl-dim); margin: 6px 0 0; font-size: 12px; }
`;

const SECONDS_PER_STEP = 1.2;

function html(parent, name, attributes = {}, text = null) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function render({ model, el }) {
  const frames = model.get("frames");
  const looks = model.get("looks");
  const last = frames.length - 1;
  const layout = layoutOf(frames, model.get("world_size"));
  let timer = null;

  // JupyterLab listens to keys before the page does; this attribute tells it that the keys here are ours.
  const root = html(el, "div", {
    class: "sl-ring", tabindex: "0", role: "group", "data-lm-suppress-shortcuts": "true",
    "aria-label": `${model.get("title")}, step by step. Left and right arrow keys step, Home and End jump, space plays.`,
  });
  html(root, "style", {}, STYLE);
  html(root, "p", { class: "sl-title" }, model.get("title"));
  const controls = html(root, "div", { class: "sl-controls" });
  const button = (label, sign, action) => {
    const node = html(controls, "button", { type: "button", "aria-label": label, title: label }, sign);
    node.addEventListener("click", () => node.getAttribute("aria-disabled") !== "true" && action());
    return node;
  };
  const first = button("first step", "|◀", () => { stop(); go(0); });
  const previous = button("previous step", "◀", () => { stop(); go(step() - 1); });
  const play = button("play", "▶ play", () => (timer ? stop() : start()));
  const next = button("next step", "▶", () => { stop(); go(step() + 1); });
  const end = button("last step", "▶|", () => { stop(); go(last); });
  const slider = html(controls, "input", { type: "range", min: 0, max: last, step: 1, "aria-label": "step" });
  const count = html(controls, "span", { class: "sl-count" });
  const caption = html(root, "p", { class: "sl-caption", "aria-live": "polite" });
  const stage = html(root, "div", { class: "sl-stage" });
  html(root, "p", { class: "sl-legend" },
    "A numbered block is that rank's data. Dashed: not in this chunk. ✓ all ranks' data, each once. " +
    "× added more than once. ? garbage. ! should be complete at the end. Outer frame: changed in this step.");

  const step = () => Math.max(0, Math.min(last, model.get("step")));

  function go(target) {
    const wanted = Math.max(0, Math.min(last, target));
    if (wanted === model.get("step")) return;
    model.set("step", wanted);
    model.save_changes();
  }

  function start() {
    if (last === 0) return;
    if (step() === last) go(0);
    timer = setInterval(() => { go(step() + 1); if (step() === last) stop(); }, SECONDS_PER_STEP * 1000);
    controlsFor(step());
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    controlsFor(step());
  }

  function controlsFor(at) {
    // aria-disabled keeps the focus where it is; a disabled button would drop it.
    for (const node of [first, previous]) node.setAttribute("aria-disabled", String(at === 0));
    for (const node of [next, end]) node.setAttribute("aria-disabled", String(at === last));
    play.textContent = timer ? "❚❚ pause" : "▶ play";
    play.setAttribute("aria-label", timer ? "pause" : "play");
    play.title = timer ? "pause" : "play";
  }

  function draw() {
    const at = step(), frame = frames[at];
    slider.value = at;
    slider.setAttribute("aria-valuetext", frame.heading);
    count.textContent = `step ${at} of ${last}`;
    caption.textContent = frame.caption;
    caption.classList.toggle("sl-alarm", frame.wrong > 0);
    stage.replaceChildren(drawFrame(frame, layout, looks));
    root.dataset.step = at;
    controlsFor(at);
  }

  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
  root.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const onButton = event.target instanceof HTMLButtonElement;
    const actions = {
      ArrowLeft: () => { stop(); go(step() - 1); }, ArrowRight: () => { stop(); go(step() + 1); },
      Home: () => { stop(); go(0); }, End: () => { stop(); go(last); },
      " ": onButton ? null : () => (timer ? stop() : start()), // on a button, space presses it
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
  model.on("change:step", draw);
  draw();
  return () => { clearInterval(timer); model.off("change:step", draw); };
}

export default { render };

// The controls around a timeline: buttons, keys, wheel, dragging, and the line of text about what is pointed at.
// timeline_drawing.js comes before this text. The model offers get, on and off, as anywidget's does.

const STYLE = `
.sl-timeline { --sl-ink: var(--jp-ui-font-color0, #111); --sl-dim: var(--jp-ui-font-color2, #5f5f5f);
  --sl-page: var(--jp-layout-color0, #fff); --sl-raised: var(--jp-layout-color2, #eee);
  --sl-line: var(--jp-border-color0, #999); --sl-accent: var(--jp-brand-color1, #1976d2); --sl-wrong: #c4003f;
  color: var(--sl-ink); background: var(--sl-page); font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif);
  padding: 10px; border: 1px solid var(--sl-line); border-radius: 6px; max-width: 1400px; box-sizing: border-box; }
.sl-timeline:focus-visible { outline: 3px solid var(--sl-accent); outline-offset: -3px; }
.sl-timeline button:focus-visible { outline: 3px solid var(--sl-accent); outline-offset: 2px; }
.sl-timeline .sl-title { font-weight: 600; margin: 0; }
.sl-timeline .sl-summary { margin: 0 0 6px; }
.sl-timeline .sl-controls { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 4px; }
.sl-timeline button { color: inherit; background: var(--sl-raised); border: 1px solid var(--sl-line); border-radius: 4px;
  min-width: 34px; min-height: 28px; padding: 2px 8px; font: inherit; cursor: pointer; }
.sl-timeline button[aria-disabled="true"] { opacity: .45; cursor: default; }
.sl-timeline .sl-range { font-variant-numeric: tabular-nums; color: var(--sl-dim); }
.sl-timeline .sl-said { min-height: 2.9em; margin: 4px 0; }
.sl-timeline .sl-stage { cursor: grab; touch-action: pan-y; user-select: none; -webkit-user-select: none; }
.sl-timeline .sl-stage.sl-dragging { cursor: grabbing; }
.sl-timeline svg { display: block; }
.sl-timeline .sl-plot { overflow: hidden; }
.sl-timeline svg text { fill: var(--sl-ink); font-size: 11px; }
.sl-timeline svg .sl-box { stroke: #111; stroke-width: .8; }
.sl-timeline svg .sl-thin { stroke: none; }
.sl-timeline svg .sl-label { fill: #000; }
.sl-timeline svg .sl-pill { stroke: var(--sl-ink); }
.sl-timeline svg :is(.sl-rank, .sl-name, .sl-tick, .sl-waits, .sl-lostname) { text-anchor: middle; }
.sl-timeline svg :is(.sl-rank, .sl-verdict) { font-weight: 600; }
.sl-timeline svg .sl-lane { text-anchor: end; fill: var(--sl-dim); font-size: 10px; }
.sl-timeline svg .sl-lost { fill: var(--sl-dim); }
.sl-timeline svg .sl-tick { fill: var(--sl-dim); font-size: 10px; }
.sl-timeline svg .sl-grid { stroke: var(--sl-line); stroke-width: .6; stroke-dasharray: 2 3; fill: none; }
.sl-timeline svg .sl-alarm { fill: var(--sl-wrong); }
.sl-timeline svg .sl-alarmed { fill: #fff; }
.sl-timeline svg .sl-exposed { fill: #fff; stroke: var(--sl-wrong); stroke-width: 1; }
.sl-timeline svg .sl-exposed.sl-thin { fill: var(--sl-wrong); stroke: none; }
.sl-timeline svg .sl-hatch { stroke: var(--sl-wrong); stroke-width: 1.1; fill: none; }
.sl-timeline svg .sl-lostname-card { fill: #fff; }
.sl-timeline svg .sl-lostname { fill: var(--sl-wrong); font-weight: 600; }
.sl-timeline svg .sl-wait, .sl-timeline svg .sl-waits-card { fill: var(--sl-page); }
.sl-timeline svg .sl-wait { stroke: var(--sl-line); stroke-width: .8; }
.sl-timeline svg .sl-wait.sl-thin { fill: var(--sl-dim); stroke: none; }
.sl-timeline svg .sl-waits { font-size: 10px; fill: var(--sl-dim); }
.sl-timeline svg .sl-dots { stroke: var(--sl-dim); stroke-width: 1.5; stroke-dasharray: 1.5 3; fill: none; }
.sl-timeline svg .sl-chosen { fill: none; stroke: var(--sl-accent); stroke-width: 3; }
.sl-timeline .sl-legend { color: var(--sl-dim); margin: 4px 0 0; font-size: 12px; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: center; }
.sl-timeline .sl-legend svg { display: inline-block; vertical-align: -2px; margin-right: 5px; }
`;

const CLOSEST = 20; // microseconds that the view is wide at least
const FACTOR = 1.5;

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
    html(parent, "span").innerHTML = `<svg width="22" height="13">${ink.out()}</svg>${escapeText(words)}`;
  };
  const used = new Set(data.ranks.flatMap((rank) => rank.compute.map(([kind]) => kind)));
  const words = { forward: "F forward", backward: "B backward", recompute: "R forward repeated in backward", other: "O other" };
  for (const [kind, text] of Object.entries(words)) {
    if (used.has(kind)) swatch((ink) => ink.box(data.kinds[kind].fill, 1, 1, 20, 11), text);
  }
  swatch((ink) => { ink.box("sl-wait", 1, 1, 20, 11); for (const y of [4.5, 8.5]) ink.line("sl-dots", 3, y, 20, y); }, "waits");
  swatch((ink) => ink.box(looks[0].fill, 1, 1, 20, 11), "communication, hidden");
  swatch((ink) => { ink.box("sl-exposed", 1, 1, 20, 11); ink.hatch(1, 1, 20, 11); }, "communication, exposed");
  html(parent, "span", {}, "A number on the link is the reduction's bucket; → on a layer: the buckets of its gradients.");
  html(parent, "span", {}, "Keys: ← → ↑ ↓ from span to span, shift ← → move, + − zoom, 0 all, Enter zooms to the span. " +
    "Drag to move; once clicked, the wheel zooms.");
}

function render({ model, el }) {
  const data = model.get("data"), looks = model.get("looks");
  const items = itemsOf(data);
  const margin = 0.01 * data.end, whole = { from: -margin, to: data.end + margin };
  let view = { ...whole }, width = 1000, chosen = null, pointed = null, frame = null, drag = null;

  // JupyterLab listens to keys before the page does; this attribute tells it that the keys here are ours.
  const root = html(el, "div", {
    class: "sl-timeline", tabindex: "0", role: "group", "data-lm-suppress-shortcuts": "true", "aria-roledescription": "timeline",
    "aria-label": `${data.title}: ${data.summary}. Arrow keys go from span to span, shift and arrow keys move, plus and minus zoom, 0 shows all.`,
  });
  html(root, "style", {}, STYLE);
  html(root, "p", { class: "sl-title" }, data.title);
  html(root, "p", { class: "sl-summary" }, data.summary);
  const controls = html(root, "div", { class: "sl-controls" });
  const button = (label, sign, action) => {
    const node = html(controls, "button", { type: "button", "aria-label": label, title: label }, sign);
    node.addEventListener("click", () => node.getAttribute("aria-disabled") !== "true" && action());
    return node;
  };
  const earlier = button("earlier", "◀", () => pan(-0.25));
  const later = button("later", "▶", () => pan(0.25));
  const nearer = button("zoom in", "+", () => zoom(FACTOR));
  const farther = button("zoom out", "−", () => zoom(1 / FACTOR));
  const fit = button("show all", "all", () => show(whole));
  const range = html(controls, "span", { class: "sl-range" });
  const said = html(root, "p", { class: "sl-said", "aria-live": "polite" });
  const stage = html(root, "div", { class: "sl-stage" });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${data.ranks.length} ranks: ${data.ranks.map((rank) => `rank ${rank.rank} ${rank.verdict}`).join(", ")}`);
  stage.appendChild(svg);
  legend(html(root, "div", { class: "sl-legend" }), data, looks);

  function show(wanted) {
    const most = whole.to - whole.from, size = Math.min(most, Math.max(CLOSEST, wanted.to - wanted.from));
    const from = Math.min(Math.max(wanted.from, whole.from), whole.to - size);
    view = { from, to: from + size };
    Object.assign(root.dataset, { from: Math.round(view.from), to: Math.round(view.to) });
    range.textContent = `${moment(Math.max(0, view.from))} to ${moment(Math.min(data.end, view.to))}`;
    const all = size >= most - 1;
    for (const node of [farther, fit]) node.setAttribute("aria-disabled", String(all));
    nearer.setAttribute("aria-disabled", String(size <= CLOSEST));
    earlier.setAttribute("aria-disabled", String(view.from <= whole.from + 0.5));
    later.setAttribute("aria-disabled", String(view.to >= whole.to - 0.5));
    redraw();
  }

  function zoom(factor, around = null) {
    const size = view.to - view.from;
    let at = around;
    if (at === null) at = chosen && chosen.to >= view.from && chosen.from <= view.to ? (chosen.from + chosen.to) / 2 : view.from + size / 2;
    const next = Math.min(whole.to - whole.from, Math.max(CLOSEST, size / factor));
    show({ from: at - ((at - view.from) / size) * next, to: at + ((view.to - at) / size) * next });
  }

  function pan(share) {
    const by = share * (view.to - view.from);
    show({ from: view.from + by, to: view.to + by });
  }

  function redraw() {
    // At most once a frame, however fast the wheel turns.
    frame ??= requestAnimationFrame(() => { frame = null; draw(); });
  }

  function draw() {
    const { height, inside } = drawView(data, looks, items, view, width);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.innerHTML = inside;
    mark();
  }

  function mark() {
    const item = pointed || chosen, box = svg.querySelector(".sl-chosen");
    if (!box) return;
    box.setAttribute("visibility", item ? "visible" : "hidden");
    if (item) for (const [key, value] of Object.entries(frameOf(item, view, width))) box.setAttribute(key, value);
  }

  function speak() {
    const item = pointed || chosen;
    const text = item ? sentence(data, item) : "Point at a span, or use the arrow keys.";
    if (said.textContent !== text) said.textContent = text;
    mark();
  }

  function choose(item) {
    chosen = item;
    pointed = null;
    root.dataset.chosen = item ? `${item.row}/${item.lane}/${items[item.row][item.lane].indexOf(item)}` : "";
    if (item && (item.from < view.from || item.to > view.to)) {
      const size = view.to - view.from, middle = (item.from + item.to) / 2;
      // A span that is longer than the view is shown from its beginning.
      const from = item.to - item.from > size ? item.from - size / 20 : middle - size / 2;
      show({ from, to: from + size });
    }
    speak();
  }

  const lanes = items.flat();
  const laneOf = (item) => item.row * 2 + item.lane;

  function step(by) {
    if (!chosen) {
      const inView = (item) => item.to >= view.from && item.from <= view.to;
      return choose(lanes.flatMap((lane) => lane.filter(inView))[0] || null);
    }
    const lane = lanes[laneOf(chosen)];
    choose(lane[Math.min(lane.length - 1, Math.max(0, lane.indexOf(chosen) + by))]);
  }

  function changeLane(by) {
    if (!chosen) return step(0);
    const middle = (item) => (item.from + item.to) / 2, here = middle(chosen);
    let at = laneOf(chosen) + by;
    while (at >= 0 && at < lanes.length && lanes[at].length === 0) at += by;
    if (at < 0 || at >= lanes.length) return;
    choose(lanes[at].reduce((best, item) => (Math.abs(middle(item) - here) < Math.abs(middle(best) - here) ? item : best)));
  }

  function closer() {
    if (!chosen) return step(0);
    const size = Math.max(CLOSEST, 2 * (chosen.to - chosen.from)), middle = (chosen.from + chosen.to) / 2;
    show({ from: middle - size / 2, to: middle + size / 2 });
  }

  function place(event) {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  const timeAt = (px) => view.from + ((px - LEFT) / (width - LEFT - RIGHT)) * (view.to - view.from);

  root.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const onButton = event.target instanceof HTMLButtonElement;
    const arrow = (by) => () => (event.shiftKey ? pan(0.2 * by) : step(by));
    const actions = {
      ArrowLeft: arrow(-1), ArrowRight: arrow(1), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
      "+": () => zoom(FACTOR), "=": () => zoom(FACTOR), "-": () => zoom(1 / FACTOR), "_": () => zoom(1 / FACTOR),
      0: () => show(whole), Home: () => show(whole),
      Enter: onButton ? null : closer, Escape: chosen ? () => choose(null) : null,
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
  stage.addEventListener("wheel", (event) => {
    // The wheel belongs to the page until the timeline was clicked (or with ctrl, as on a touch pad's pinch).
    if (!event.ctrlKey && !root.contains(root.getRootNode().activeElement)) return;
    event.preventDefault();
    const [px] = place(event), sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (sideways) pan(sideways / (width - LEFT - RIGHT));
    else zoom(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.002)), timeAt(Math.max(px, LEFT)));
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    root.focus({ preventScroll: true, focusVisible: false });
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    stage.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  stage.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (drag?.moved) {
      stage.classList.add("sl-dragging");
      const by = ((drag.x - event.clientX) / (width - LEFT - RIGHT)) * (drag.to - drag.from);
      show({ from: drag.from + by, to: drag.to + by });
      return;
    }
    pointed = itemAt(items, view, width, ...place(event));
    speak();
  });
  const release = (event) => {
    if (drag && !drag.moved && event.type === "pointerup") choose(itemAt(items, view, width, ...place(event)));
    drag = null;
    stage.classList.remove("sl-dragging");
  };
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);
  stage.addEventListener("pointerleave", () => { pointed = null; speak(); });
  stage.addEventListener("dblclick", closer);

  const resize = new ResizeObserver(() => {
    const wanted = Math.max(480, Math.floor(stage.clientWidth));
    if (stage.clientWidth && wanted !== width) { width = wanted; redraw(); }
  });
  resize.observe(stage);
  width = Math.max(480, Math.floor(stage.clientWidth) || 1000);
  show(whole);
  draw();
  speak();
  return () => { resize.disconnect(); cancelAnimationFrame(frame); };
}

export default { render };

// Draws the part of a timeline that lies in a view {from, to}, in microseconds, as the inside of an <svg>.
// Plain data in (see timeline_data.py), text out. All shapes of a kind are one path: hundreds of spans stay quick.

const LANE = 26, BETWEEN = 3, GAP = 16, TOP = 22, WAIT = 11, LEFT = 132, RIGHT = 12, AXIS = 22;
const LETTER = 6; // the width of a letter of the labels, on average
const ROW = 2 * LANE + BETWEEN + GAP;

const escapeText = (text) => String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
const round = (number) => Math.round(number * 10) / 10;

function duration(micro) {
  const digits = (number) => number.toFixed(number < 9.995 ? 2 : number < 99.95 ? 1 : 0);
  if (micro < 999.5) return `${Math.round(micro)} us`;
  return micro < 999500 ? `${digits(micro / 1e3)} ms` : `${digits(micro / 1e6)} s`;
}

const moment = (micro) => `${(micro / 1000).toFixed(2)} ms`;

function ticksOf(view, width) {
  const rough = (view.to - view.from) / Math.max(2, width / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough));
  const ticks = [];
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) ticks.push(at);
  return { ticks, step };
}

function tickText(micro, step) {
  const decimals = step >= 1000 ? 0 : Math.min(3, Math.ceil(-Math.log10(step / 1000)));
  return `${(micro / 1000).toFixed(decimals)} ms`;
}

// The longest part of a span in which no other lies within it: there its label is readable. In `compute`, what lies
// within a span follows it.
function freePart(compute, i) {
  const item = compute[i];
  let at = item.from, best = [at, at];
  const gap = (end) => { if (end - at > best[1] - best[0]) best = [at, end]; };
  for (const inner of compute.slice(i + 1)) {
    if (inner.from >= item.to || inner.level <= item.level) break;
    gap(inner.from);
    at = Math.max(at, inner.to);
  }
  gap(item.to);
  return best;
}

// Everything that can be pointed at, by rank and lane, in the order of time.
function itemsOf(data) {
  return data.ranks.map((rank, row) => {
    const compute = rank.compute.map(([kind, label, from, to, level, buckets]) => ({ row, lane: 0, kind, label, from, to, level, buckets }));
    compute.forEach((item, i) => { item.free = freePart(compute, i); });
    for (let i = 0; i < rank.waiting.length; i += 2) {
      compute.push({ row, lane: 0, kind: "waiting", label: "", from: rank.waiting[i], to: rank.waiting[i + 1], level: 9, buckets: [] });
    }
    const link = rank.link
      .filter(([, , , , from, to]) => from !== null && to !== null)
      .map(([op, bytes, bucket, issued, from, to, exposed, waits]) => ({ row, lane: 1, kind: "link", op, bytes, bucket, issued, from, to, exposed, waits }));
    const inOrder = (a, b) => a.from - b.from || a.to - b.to;
    return [compute.sort(inOrder), link.sort(inOrder)];
  });
}

const pairs = (flat) => flat.flatMap((time, i) => (i % 2 ? [] : [[time, flat[i + 1]]]));
const lengthOf = (flat) => pairs(flat).reduce((sum, [from, to]) => sum + to - from, 0);

function hiddenPieces(item) {
  const pieces = [];
  let at = item.from;
  for (const [from, to] of pairs(item.exposed)) {
    if (from > at) pieces.push([at, from]);
    at = to;
  }
  if (at < item.to) pieces.push([at, item.to]);
  return pieces;
}

function sentence(data, item) {
  const rank = data.ranks[item.row].rank;
  const when = `from ${moment(item.from)} to ${moment(item.to)} (${duration(item.to - item.from)})`;
  if (item.kind === "waiting") return `rank ${rank} stands still ${when}: it waits for communication.`;
  if (item.kind !== "link") {
    const words = { forward: "forward of ", backward: "backward of ", recompute: "forward of ", other: "" }[item.kind];
    const again = item.kind === "recompute" ? ", repeated during backward" : "";
    const many = item.buckets.length > 1;
    const buckets = item.buckets.length ? `; its gradients travel in bucket${many ? "s" : ""} ${item.buckets.join(", ")}` : "";
    return `rank ${rank} computes: ${words}${item.label}${again}, ${when}${buckets}.`;
  }
  const exposed = lengthOf(item.exposed), whole = item.to - item.from;
  const how = exposed === 0 ? "hidden" : exposed >= whole ? "exposed"
    : `${duration(whole - exposed)} hidden, ${duration(exposed)} exposed`;
  const bucket = item.bucket === null ? "" : ` of bucket ${item.bucket}`;
  const medium = data.clock === "link" ? "on the link" : "under way";
  const waits = item.waits.length ? `; a thread stood still for it for ${duration(lengthOf(item.waits))}` : "";
  return `rank ${rank}, ${item.op}${bucket}, ${item.bytes}: issued at ${moment(item.issued)}, ${medium} ${when}: ${how}${waits}.`;
}

// Collects pieces of paths by kind.
function pen() {
  const boxes = new Map(), lines = new Map(), texts = [], cards = [];
  const add = (map, key, piece) => map.set(key, (map.get(key) || "") + piece);
  return {
    box(key, x, y, width, height, level = 0) {
      const thin = width < 2.5 ? " sl-thin" : "";
      if (!boxes.has(level)) boxes.set(level, new Map());
      add(boxes.get(level), key + thin, `M${round(x)} ${y}h${round(Math.max(width, 0.5))}v${height}h${-round(Math.max(width, 0.5))}z`);
    },
    line(key, x0, y0, x1, y1) { add(lines, key, `M${round(x0)} ${round(y0)}L${round(x1)} ${round(y1)}`); },
    hatch(x, y, width, height) {
      for (let offset = 3; offset < width + height; offset += 7) {
        this.line("sl-hatch", x + Math.max(0, offset - height), y + Math.min(offset, height), x + Math.min(offset, width), y + Math.max(0, offset - width));
      }
    },
    text(kind, x, y, text, fill = "") {
      texts.push(`<text class="${kind}" x="${round(x)}" y="${y}"${fill && ` style="fill:${fill}"`}>${escapeText(text)}</text>`);
    },
    tag(kind, x, y, text) {
      const width = text.length * LETTER + 2;
      cards.push(`<rect class="${kind}-card" x="${round(x - width / 2)}" y="${y - 6}" width="${width}" height="12" rx="2"/>`);
      this.text(kind, x, y + 4, text);
    },
    out() {
      const path = ([key, d]) => `<path class="${key.startsWith("#") ? "sl-box" + (key.includes("sl-thin") ? " sl-thin" : "") : key}"${key.startsWith("#") ? ` style="fill:${key.split(" ")[0]}"` : ""} d="${d}"/>`;
      const under = [...lines].filter(([key]) => key === "sl-grid"), over = [...lines].filter(([key]) => key !== "sl-grid");
      const levels = [...boxes].sort(([a], [b]) => a - b).flatMap(([, paths]) => [...paths]);
      return [...under.map(path), ...levels.map(path), ...over.map(path), ...cards, ...texts].join("");
    },
  };
}

function drawView(data, looks, items, view, width) {
  const plot = width - LEFT - RIGHT, scale = plot / (view.to - view.from);
  const height = TOP + data.ranks.length * ROW - GAP + AXIS;
  const x = (time) => (time - view.from) * scale;
  const inView = (item) => x(item.to) >= -1 && x(item.from) <= plot + 1;
  // Far outside, numbers would grow beyond what browsers draw well.
  const cut = (from, to) => { const a = Math.max(-9, x(from)), b = Math.min(plot + 9, x(to)); return [a, b - a]; };
  const seen = (from, to) => { const a = Math.max(0, x(from)), b = Math.min(plot, x(to)); return [a, b - a]; };
  const heads = [], ink = pen(), { ticks, step } = ticksOf(view, plot);
  for (const time of ticks) {
    ink.line("sl-grid", x(time), TOP - 4, x(time), height - AXIS + 4);
    ink.text("sl-tick", Math.min(Math.max(x(time), 14), plot - 22), height - 6, tickText(time, step));
  }
  data.ranks.forEach((rank, row) => {
    const y = TOP + row * ROW, below = y + LANE + BETWEEN, look = looks[row];
    heads.push(
      `<rect class="sl-pill" x="2" y="${y + 3}" width="58" height="19" rx="9.5" style="fill:${look.fill}"/>`,
      `<text class="sl-rank" x="31" y="${y + 17}" style="fill:${look.text}">rank ${rank.rank}</text>`,
      `<text class="sl-lane" x="${LEFT - 6}" y="${y + 17}">compute</text><text class="sl-lane" x="${LEFT - 6}" y="${below + 17}">link</text>`,
      rank.alarm ? `<rect class="sl-alarm" x="-1" y="${below}" width="${round(rank.verdict.length * 6.8 + 10)}" height="15" rx="3"/>` : "",
      `<text class="sl-verdict${rank.alarm ? " sl-alarmed" : ""}" x="${rank.alarm ? 4 : 2}" y="${below + 12}">${rank.verdict}</text>`,
      rank.verdict === "nothing sent" ? "" : `<text class="sl-lost" x="2" y="${below + 25}">exposed ${rank.exposed}</text>`,
    );
    for (const item of items[row][0]) if (inView(item)) drawCompute(ink, data, item, y, cut, seen);
    for (const item of items[row][1]) if (inView(item)) drawLink(ink, item, below, look, cut, seen);
  });
  return {
    height,
    inside: `${heads.join("")}<svg class="sl-plot" x="${LEFT}" y="0" width="${plot}" height="${height}">${ink.out()}<rect class="sl-chosen" visibility="hidden" rx="3"/></svg>`,
  };
}

// cut, seen: left edge and width of a stretch of time, as drawn, and as much of it as can be seen (for labels).
function drawCompute(ink, data, item, y, cut, seen) {
  const [x, width] = cut(item.from, item.to), [left, room] = seen(...(item.free || [item.from, item.to]));
  if (item.kind === "waiting") {
    const top = y + LANE - WAIT;
    ink.box("sl-wait", x, top, width, WAIT, 9);
    if (width > 4) for (const row of [0.3, 0.7]) ink.line("sl-dots", x + 2, top + row * WAIT, x + width - 1, top + row * WAIT);
    if (room > 42) ink.tag("sl-waits", left + room / 2, top + WAIT / 2, "waits");
    return;
  }
  const look = data.kinds[item.kind], inset = Math.min(item.level, 2) * 5;
  ink.box(look.fill, x, y + inset, width, LANE - inset, item.level);
  const label = `${look.sign} ${item.label}`, buckets = item.buckets.length ? ` →${item.buckets.join(",")}` : "";
  const fits = [label + buckets, label, look.sign + buckets, look.sign].find((text) => text.length * LETTER + 5 <= room);
  if (fits) ink.text("sl-label", left + 3, y + inset + 12, fits);
}

function drawLink(ink, item, y, look, cut, seen) {
  const widest = (pieces) => pieces.map(([from, to]) => seen(from, to)).reduce((best, piece) => (piece[1] > best[1] ? piece : best), [0, 0]);
  const hidden = hiddenPieces(item), exposed = pairs(item.exposed);
  if (item.from === item.to) ink.box(look.fill, ...[cut(item.from, item.to)[0], y, 0, LANE]);
  for (const [from, to] of hidden) {
    const [x, width] = cut(from, to);
    if (width > -9) ink.box(look.fill, x, y, Math.max(0, width), LANE);
  }
  for (const [from, to] of exposed) {
    const [x, width] = cut(from, to);
    if (width <= 0) continue;
    ink.box("sl-exposed", x, y, width, LANE);
    if (width > 2) ink.hatch(x, y, width, LANE);
  }
  let name = item.bucket === null ? item.op : String(item.bucket);
  let [x, width] = widest(hidden);
  if (name.length * LETTER + 5 <= width) {
    ink.text("sl-name", x + width / 2, y + LANE / 2 + 4, name, look.text);
    name = "";
  }
  [x, width] = widest(exposed);
  const fits = [`${name} exposed`.trim(), name].find((text) => text && text.length * LETTER + 7 <= width);
  if (fits) ink.tag("sl-lostname", x + width / 2, y + LANE / 2, fits);
}

// Where an item is drawn, for the frame around it; and the item at a place.
function frameOf(item, view, width) {
  const scale = (width - LEFT - RIGHT) / (view.to - view.from);
  const y = TOP + item.row * ROW + item.lane * (LANE + BETWEEN) + (item.kind === "waiting" ? LANE - WAIT : 0);
  const from = Math.max(-20, (item.from - view.from) * scale), to = Math.min(width, (item.to - view.from) * scale);
  return { x: round(from - 2), y: y - 2, width: round(Math.max(0, to - from) + 4), height: (item.kind === "waiting" ? WAIT : LANE) + 4 };
}

function itemAt(items, view, width, px, py) {
  const scale = (width - LEFT - RIGHT) / (view.to - view.from), time = view.from + (px - LEFT) / scale, reach = 4 / scale;
  const row = Math.floor((py - TOP + GAP / 2) / ROW);
  if (row < 0 || row >= items.length || px < LEFT - 4) return null;
  const inRow = py - TOP - row * ROW, lane = inRow <= LANE + BETWEEN / 2 ? 0 : 1;
  const near = items[row][lane].filter((item) => item.from - reach <= time && time <= item.to + reach);
  const low = lane === 0 && inRow > LANE - WAIT; // there the waits are drawn over the layers
  // What encloses the place before what is only near, the innermost and shortest first.
  const badness = (item) => (item.kind === "waiting" && !low ? 1e12 : 0)
    + (low && item.kind === "waiting" ? -1e11 : 0)
    + Math.max(0, item.from - time, time - item.to) * 1e6 + (item.to - item.from);
  return near.reduce((best, item) => (best === null || badness(item) < badness(best) ? item : best), null);
}

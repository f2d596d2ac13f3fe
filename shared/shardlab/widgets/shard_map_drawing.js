// Draws what is held at one event as the inside of an <svg>: a row per rank and kind of state, all parameters across, and
// each rank's live bytes beside the formula. All shapes of a look are one path.

const LEFT = 70, NUMBERS = 68, TOP = 20, ROW = 13, BETWEEN = 5, BAR = 14, GAP = 18;

const escapeText = (text) => String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
const round = (number) => Math.round(number * 10) / 10;
const blockOf = (data) => data.kinds.length * (ROW + BETWEEN) + BAR + GAP;
const heightOf = (data) => TOP + data.ranks * blockOf(data) - GAP + 4;

function pen() {
  const paths = new Map(), texts = [];
  const add = (key, piece) => paths.set(key, (paths.get(key) || "") + piece);
  return {
    // look: a class, or a fill colour.
    box(look, x, y, width, height, least = 0.4) { add(look, `M${round(x)} ${round(y)}h${round(Math.max(width, least))}v${height}h${-round(Math.max(width, least))}z`); },
    line(look, x0, y0, x1, y1) { add(look, `M${round(x0)} ${round(y0)}L${round(x1)} ${round(y1)}`); },
    hatch(look, x, y, width, height) {
      for (let offset = Math.min(3, width); offset < width + height; offset += 6) {
        this.line(look, x + Math.max(0, offset - height), y + Math.min(offset, height), x + Math.min(offset, width), y + Math.max(0, offset - width));
      }
    },
    text(kind, x, y, text, fill = "", around = "") {
      const style = (fill && `fill:${fill};`) + (around && `stroke:${around}`);
      texts.push(`<text class="${kind}" x="${round(x)}" y="${round(y)}"${style && ` style="${style}"`}>${escapeText(text)}</text>`);
    },
    out() {
      const path = ([key, d]) => (key.startsWith("#") ? `<path class="sl-fill" style="fill:${key}" d="${d}"/>` : `<path class="${key}" d="${d}"/>`);
      const level = ([key]) => (key.startsWith("#") || key === "sl-empty" ? 0 : key === "sl-left-over" ? 2 : 1);
      return [...paths].sort((a, b) => level(a) - level(b)).map(path).join("") + texts.join("");
    },
  };
}

// The layers along the top: [name, from, to]. blocks.0.mlp_in.weight belongs to blocks.0.
function layersOf(data) {
  const layers = [];
  let start = 0;
  for (let i = 0; i < data.columns.length; i += 2) {
    const parts = data.columns[i].split("."), stop = data.columns[i + 1];
    const name = /^\d+$/.test(parts[1] || "") ? parts.slice(0, 2).join(".") : parts[0];
    const last = layers[layers.length - 1];
    if (last && last[0] === name) last[2] = stop;
    else layers.push([name, start, stop]);
    start = stop;
  }
  return layers;
}

function drawMap(data, looks, replay, number, width) {
  const ink = pen(), plot = width - LEFT - NUMBERS, scale = plot / psiOf(data), x = (element) => LEFT + element * scale;
  const over = number === data.frames.length - 1;
  const most = Math.max(data.formula, ...data.most, 1), byteScale = (0.98 * plot) / most;
  const named = []; // the largest layers first: small ones may find no room for their names
  for (const [name, from, to] of layersOf(data).sort((a, b) => b[2] - b[1] - (a[2] - a[1]))) {
    ink.line("sl-grid", x(from), TOP - 6, x(from), heightOf(data));
    const left = x(from) + 3, right = left + name.length * 6;
    if (right > width || named.some(([a, b]) => left < b && a < right)) continue;
    ink.text("sl-layer", left, TOP - 6, name);
    named.push([left, right]);
  }
  for (let rank = 0; rank < data.ranks; rank++) {
    const top = TOP + rank * blockOf(data), look = looks[rank];
    ink.box(look.fill, 4, top, 44, 18);
    ink.text("sl-rank", 26, top + 13, `rank ${rank}`, look.text);
    data.kinds.forEach(({ sign }, kind) => {
      const y = top + kind * (ROW + BETWEEN), held = replay.held(rank, kind);
      ink.text("sl-sign", LEFT - 6, y + ROW - 2, sign);
      ink.box("sl-empty", LEFT, y, plot, ROW);
      const wrong = over ? pairsOf(data.left_over[rank * data.kinds.length + kind]) : [];
      for (const [from, to, owner] of ownedOf(data, held)) drawPiece(ink, looks[owner], owner, x(from), y, (to - from) * scale);
      for (const [from, to] of wrong) ink.box("sl-left-over", x(from), y, (to - from) * scale, ROW, 1);
      for (const [from, to] of replay.flying(rank, kind)) ink.hatch("sl-flying", x(from), y, (to - from) * scale, ROW);
      for (const [from, to] of replay.changed(rank, kind)) ink.box("sl-changed", x(from), y + ROW + 1, (to - from) * scale, 2, 1);
      const share = `${percent(sizeOf(held), psiOf(data))} %`;
      ink.text(wrong.length ? "sl-share sl-wrong" : "sl-share", LEFT + plot + 5, y + ROW - 2, wrong.length ? `${share} !` : share);
    });
    drawBar(ink, data, replay, rank, top + data.kinds.length * (ROW + BETWEEN), byteScale, plot, over);
  }
  return ink.out();
}

// look is undefined where nobody owns it.
function drawPiece(ink, look, owner, x, y, width) {
  ink.box(look ? look.fill : "#BDBDBD", x, y, width, ROW);
  if (!look) return;
  if (look.pattern !== "solid" && width > 2) ink.line(look.text === "#000000" ? "sl-stripe-dark" : "sl-stripe-light", x, y + ROW / 2, x + width, y + ROW / 2);
  if (width >= 6 * String(owner).length + 2) ink.text("sl-digit", x + width / 2, y + ROW - 3, owner, look.text, look.fill);
}

// What is over the formula is framed; after the step, when nothing should be, it is marked as wrong.
function drawBar(ink, data, replay, rank, y, scale, plot, stepIsOver) {
  let at = LEFT;
  ink.text("sl-sign", LEFT - 6, y + BAR - 4, "bytes");
  replay.bytes(rank).forEach((size, part) => {
    if (size) ink.box(`sl-bytes sl-part-${part}`, at, y + 2, size * scale, BAR - 4);
    at += size * scale;
  });
  const line = LEFT + data.formula * scale, wrong = stepIsOver && data.over[rank];
  if (at > line + 0.75) ink.box(wrong ? "sl-left-over" : "sl-beyond", line, y + 2, at - line, BAR - 4, 1);
  if (wrong) ink.hatch("sl-over-hatch", line, y + 2, at - line, BAR - 4);
  ink.box("sl-formula", line - 1, y - 1, 2, BAR + 2);
  const peak = LEFT + data.most[rank] * scale;
  ink.line("sl-most", peak, y, peak, y + BAR);
  const held = bytesText(stateBytes(replay, rank));
  ink.text(wrong ? "sl-share sl-wrong" : "sl-share", LEFT + plot + 5, y + BAR - 3, wrong ? `${held} !` : held);
}

// Where in the map a point of the drawing is: {rank, kind, element}, or null.
function placeAt(data, width, px, py) {
  const plot = width - LEFT - NUMBERS, rank = Math.floor((py - TOP) / blockOf(data));
  const kind = Math.floor((py - TOP - rank * blockOf(data)) / (ROW + BETWEEN));
  if (py < TOP || rank >= data.ranks || kind >= data.kinds.length || px < LEFT || px >= LEFT + plot) return null;
  return { rank, kind, element: Math.floor(((px - LEFT) / plot) * psiOf(data)) };
}

// Draws one frame of a ring run as SVG: a row of chunks per rank, and the step's messages as arrows.
// Plain data in (see ring_frames.py), one <svg> out. No state is kept here.

const SVG = "http://www.w3.org/2000/svg";
const SEGMENT = { width: 12, height: 17, perLine: 8 };
const LABEL_WIDTH = 96;
const COLUMN_GAP = 14;
const ROW_GAP = 38;
const HEADER = 18;

function element(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function layoutOf(frames, worldSize) {
  const columns = frames[0].cells[0].length;
  const lines = Math.ceil(worldSize / SEGMENT.perLine);
  const cellWidth = Math.max(80, Math.min(worldSize, SEGMENT.perLine) * SEGMENT.width + 12);
  const cellHeight = lines * (SEGMENT.height + 2) + 26;
  // Messages that are no chunk of the list get a column of their own, left of the chunks.
  const strays = frames.some((frame) => frame.arrows.some((arrow) => arrow.chunk === null));
  const margin = worldSize > 1 ? ROW_GAP : 6;
  const left = LABEL_WIDTH + (strays ? 96 : 0);
  return {
    columns, cellWidth, cellHeight, worldSize,
    x: (chunk) => (chunk === null ? LABEL_WIDTH : left + chunk * (cellWidth + COLUMN_GAP)),
    y: (rank) => HEADER + margin + rank * (cellHeight + ROW_GAP),
    width: left + columns * (cellWidth + COLUMN_GAP) + 30,
    height: HEADER + 2 * margin + worldSize * (cellHeight + ROW_GAP) - ROW_GAP,
  };
}

function drawPattern(parent, look, x, y, width, height) {
  const stroke = { class: "sl-pattern", stroke: look.text, "stroke-width": 1, fill: "none" };
  const slash = `M${x} ${y + height} L${x + width} ${y}`;
  if (look.pattern === "striped") element(parent, "path", { ...stroke, d: slash });
  if (look.pattern === "crossed") element(parent, "path", { ...stroke, d: `${slash} M${x} ${y} L${x + width} ${y + height}` });
  if (look.pattern === "dotted") element(parent, "path", { ...stroke, "stroke-dasharray": "1 3", d: slash });
}

function hatch(x, y, width, height, gap, crossed) {
  // Slanted lines, clipped by hand to the box so that no clip path (and no id) is needed.
  const parts = [];
  for (let offset = gap / 2; offset < width + height; offset += gap) {
    const x0 = Math.max(0, offset - height), y0 = Math.min(offset, height);
    const x1 = Math.min(offset, width), y1 = Math.max(0, offset - width);
    parts.push(`M${x + x0} ${y + y0} L${x + x1} ${y + y1}`);
    if (crossed) parts.push(`M${x + x0} ${y + height - y0} L${x + x1} ${y + height - y1}`);
  }
  return parts.join(" ");
}

function drawSegment(parent, look, rank, count, x, y) {
  const width = SEGMENT.width - 2, height = SEGMENT.height;
  const filled = count > 0;
  element(parent, "rect", {
    x, y, width, height, rx: 2, class: filled ? "sl-segment" : "sl-segment sl-empty", fill: filled ? look.fill : "none",
  });
  if (filled) drawPattern(parent, look, x, y, width, height);
  element(parent, "text", {
    x: x + width / 2, y: y + 12.5, class: filled ? "sl-digit" : "sl-digit sl-faint",
    style: `font-size: ${rank > 9 ? 8 : 10}px;${filled ? ` fill: ${look.text}` : ""}`,
  }, String(rank));
  if (count > 1) {
    element(parent, "rect", { x: x - 0.5, y: y - 2.5, width: width + 1, height: height + 5, class: "sl-twice" });
  }
}

function stateText(cell) {
  const counts = [...cell.counts].map(Number);
  if (cell.state === "complete") return "✓ complete";
  if (cell.state === "unfilled") return "not filled";
  if (cell.state === "garbage") return "? garbage";
  const most = Math.max(...counts);
  if (cell.state === "repeated") return `× rank ${counts.indexOf(most)}: ×${most}`;
  if (cell.counts === "") return "! garbage";
  return `${cell.state === "missing" ? "! only " : ""}${counts.filter((n) => n === 1).length} of ${counts.length}`;
}

function drawCell(parent, layout, looks, cell, rank, chunk) {
  const x = layout.x(chunk), y = layout.y(rank), width = layout.cellWidth, height = layout.cellHeight;
  const group = element(parent, "g", { class: `sl-cell sl-${cell.state}${cell.changed ? " sl-changed" : ""}` });
  const text = stateText(cell);
  element(group, "title", {}, `rank ${rank}, chunk ${chunk}: ${text}`);
  element(group, "rect", { x, y, width, height, rx: 4, class: "sl-box" });
  if (cell.changed) {
    element(group, "rect", { x: x - 3.5, y: y - 3.5, width: width + 7, height: height + 7, rx: 6, class: "sl-around" });
  }
  if (cell.state === "repeated") element(group, "path", { d: hatch(x, y, width, height - 16, 7, false), class: "sl-hatch sl-thin" });
  if (cell.state === "garbage" || (cell.state === "missing" && cell.counts === "")) {
    element(group, "path", { d: hatch(x, y, width, height - 18, 8, true), class: "sl-hatch sl-thin" });
    element(group, "text", { x: x + width / 2, y: y + height / 2, class: "sl-question" }, "?");
  }
  if (cell.state === "unfilled") {
    element(group, "path", { d: hatch(x, y, width, height - 18, 8, false), class: "sl-hatch sl-unset" });
    element(group, "text", { x: x + width / 2, y: y + height - 5, class: "sl-state" }, text);
    return;
  }
  [...cell.counts].forEach((count, source) => {
    const line = Math.floor(source / SEGMENT.perLine), place = source % SEGMENT.perLine;
    const inLine = Math.min(cell.counts.length, SEGMENT.perLine);
    const start = x + (width - inLine * SEGMENT.width) / 2 + 1;
    drawSegment(group, looks[source], source, Number(count), start + place * SEGMENT.width, y + 5 + line * (SEGMENT.height + 2));
  });
  if (cell.state !== "partial") {
    element(group, "rect", { x: x + 1, y: y + height - 17, width: width - 2, height: 16, rx: 3, class: "sl-badge" });
  }
  element(group, "text", { x: x + width / 2, y: y + height - 5, class: "sl-state" }, text);
}

function blockArrow(x, from, to) {
  // A thick arrow with a head, so that its fill (the sender's colour) shows on any background.
  const head = to > from ? -9 : 9;
  return `M${x - 3} ${from} L${x - 3} ${to + head} L${x - 7} ${to + head} L${x} ${to} L${x + 7} ${to + head} L${x + 3} ${to + head} L${x + 3} ${from} Z`;
}

function drawArrow(parent, layout, looks, arrow, twoWay) {
  const { source, destination, chunk } = arrow;
  const look = looks[source];
  const group = element(parent, "g", { class: "sl-arrow" });
  element(group, "title", {}, `rank ${source} sends ${arrow.label} (${arrow.size}) to rank ${destination}`);
  const x = layout.x(chunk), width = layout.cellWidth;
  const top = (rank) => layout.y(rank) - 5, bottom = (rank) => layout.y(rank) + layout.cellHeight + 5;
  const straight = (down, from, to, lines) => {
    const at = down ? x + 13 : x + width - 13;
    element(group, "path", { d: blockArrow(at, from, to), fill: look.fill, class: "sl-shaft" });
    const middle = (from + to) / 2;
    lines.forEach((line, i) => element(group, "text", {
      x: down ? at + 10 : at - 10, y: middle - 1 + 11 * i, "text-anchor": down ? "start" : "end", class: "sl-note",
    }, line));
  };
  const lines = [arrow.label, arrow.size];
  const down = destination > source;
  const last = layout.worldSize - 1;
  if (Math.abs(destination - source) === 1) {
    const own = twoWay ? (down ? [arrow.size] : ["", arrow.size]) : lines;
    straight(down, down ? bottom(source) : top(source), down ? top(destination) : bottom(destination), own);
  } else if (source === last && destination === 0 && last > 0) {
    // The ring closes: out at the bottom edge, in at the top edge.
    straight(true, bottom(source), bottom(source) + ROW_GAP - 5, [arrow.label, `to rank ${destination}`]);
    straight(true, top(destination) - ROW_GAP + 5, top(destination), [`from rank ${source}`, arrow.size]);
  } else if (source === 0 && destination === last && last > 0) {
    straight(false, top(source), top(source) - ROW_GAP + 5, [arrow.label, `to rank ${destination}`]);
    straight(false, bottom(destination) + ROW_GAP - 5, bottom(destination), [`from rank ${source}`, arrow.size]);
  } else {
    const shift = source === destination ? 8 : 0;
    const y0 = layout.y(source) + layout.cellHeight / 2 - shift, y1 = layout.y(destination) + layout.cellHeight / 2 + shift;
    const edge = x + width, bulge = edge + 30;
    element(group, "path", { d: `M${edge} ${y0} C${bulge} ${y0} ${bulge} ${y1} ${edge + 8} ${y1}`, class: "sl-curve sl-curve-under" });
    element(group, "path", { d: `M${edge} ${y0} C${bulge} ${y0} ${bulge} ${y1} ${edge + 8} ${y1}`, class: "sl-curve", stroke: look.fill });
    element(group, "path", { d: `M${edge} ${y1} l9 -6 l0 12 Z`, fill: look.fill, class: "sl-shaft" });
    // Beside the curve, in the gap between two rows, where nothing else is.
    const gap = destination < source ? layout.y(source) - ROW_GAP / 2 : layout.y(source) + layout.cellHeight + ROW_GAP / 2;
    const note = { x: edge + 24, "text-anchor": "start", class: "sl-note" };
    element(group, "text", { ...note, y: gap - 2 }, arrow.label);
    element(group, "text", { ...note, y: gap + 9 }, arrow.size);
  }
}

function drawFrame(frame, layout, looks) {
  const { width, height } = layout;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${frame.heading}: ${frame.cells.length} ranks by ${layout.columns} chunks`);
  svg.style.maxWidth = `${Math.max(width, Math.min(1.2 * width, 900))}px`;
  svg.style.minWidth = `${Math.min(width, 560)}px`;
  for (let chunk = 0; chunk < layout.columns; chunk++) {
    element(svg, "text", { x: layout.x(chunk) + layout.cellWidth / 2, y: 13, class: "sl-head" }, `chunk ${chunk}`);
  }
  frame.cells.forEach((row, rank) => {
    const y = layout.y(rank), middle = y + layout.cellHeight / 2;
    element(svg, "rect", { x: 2, y: middle - 20, width: 62, height: 20, rx: 10, class: "sl-segment", fill: looks[rank].fill });
    element(svg, "text", { x: 33, y: middle - 6, class: "sl-rank", style: `fill: ${looks[rank].text}` }, `rank ${rank}`);
    element(svg, "text", { x: 4, y: middle + 15, class: "sl-sent" }, `sent ${frame.sent[rank]}`);
    row.forEach((cell, chunk) => drawCell(svg, layout, looks, cell, rank, chunk));
  });
  const key = (arrow) => `${arrow.source}>${arrow.destination}@${arrow.chunk}`;
  const all = new Set(frame.arrows.map(key));
  for (const arrow of frame.arrows) {
    const back = key({ source: arrow.destination, destination: arrow.source, chunk: arrow.chunk });
    drawArrow(svg, layout, looks, arrow, all.has(back));
  }
  return svg;
}

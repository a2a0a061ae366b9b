// A heat map whose cells and rows can be picked, with the course of a row at the pointer. Everything that is shown is set
// as text or as a number, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const DEEPEST = 6; // levels that are indented: a deeper tree would leave no room for its names

function shaded(one, shade) {
  one.style.background = `color-mix(in srgb, var(--amp-heat, #8f5fd7) ${Number(shade)}%, transparent)`;
  return one;
}

function cellsOf(row, chosen) {
  const cells = element("div", "cells");
  row.shades.forEach((shade, at) => {
    const cell = element("i", ["", "near", "over"][row.marks[at]]);
    if (shade === null) cell.classList.add("none");
    else shaded(cell, shade);
    if (chosen >= 0 && row.places[at] === chosen) cell.classList.add("chosen");
    cells.append(cell);
  });
  return cells;
}

function line(points, kind) {
  const one = document.createElementNS(SVG, "path");
  one.setAttribute("d", points);
  if (kind) one.setAttribute("class", kind);
  return one;
}

function curve(row, at, withEnd) {
  const svg = document.createElementNS(SVG, "svg");
  const width = Math.max(row.heights.length - 1, 1);
  svg.setAttribute("viewBox", `0 0 ${width} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  let drawn = "";
  let pen = "M";
  row.heights.forEach((height, x) => {
    if (height === null) pen = "M";
    else {
      drawn += `${pen}${x} ${100 - height}`;
      if (pen === "M") drawn += `l0.001 0`; // one that stands alone is a dot
      pen = "L";
    }
  });
  if (withEnd) svg.append(line(`M0 0H${width}`, "end"));
  svg.append(line(`M${at} 0V100`, "here"), line(drawn));
  return svg;
}

function tipOf(data, number, at) {
  const row = data.rows[number];
  const tip = [element("b", "", row.hint), element("span", "", data.columns[at])];
  if (row.places[at] < 0) return [...tip, element("div", "", "nothing measured")];
  tip.push(element("div", "", `${data.words[row.words[at]]}: ${data.places[row.places[at]]}`));
  if (row.marks[at] === 1) tip.push(element("div", "", "near: it may not double"));
  if (data.columns.length > 1) tip.push(curve(row, at, data.withEnd), element("small", "", data.curve));
  return tip;
}

function keyOf(data) {
  const key = element("div", "key");
  key.append(element("span", "", data.unit));
  for (const [shade, words] of data.key) {
    const one = element("span");
    one.append(shaded(element("i"), shade), document.createTextNode(words));
    key.append(one);
  }
  for (const mark of data.marks) {
    const one = element("span");
    one.append(mark === 1 ? shaded(element("i", "near"), 100) : element("i", "over"));
    one.append(document.createTextNode(mark === 1 ? "near overflow" : "overflowed"));
    key.append(one);
  }
  if (data.keys.includes(data.chosen)) {
    const one = element("span");
    one.append(element("i", "chosen"), document.createTextNode("shown close up below"));
    key.append(one);
  }
  return key;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const map = parentElement.querySelector(".map");
  const tip = element("div", "tip");
  tip.hidden = true;
  const cursor = () => (map.at && map.at[0] < data.rows.length && map.at[1] < data.columns.length ? map.at : null);

  const pick = (number, at) => {
    const place = data.rows[number].places[at];
    if (place >= 0) setTriggerValue("picked", `${data.keys[place]} ${at}`);
  };
  const show = (number, at) => {
    map.querySelectorAll("i.at").forEach((one) => one.classList.remove("at"));
    map.at = [number, at]; // the keyboard goes on from here, also once the map was drawn anew
    const row = rows[number];
    const cell = row.querySelectorAll("i")[at];
    cell.classList.add("at");
    tip.replaceChildren(...tipOf(data, number, at));
    tip.hidden = false;
    const left = cell.getBoundingClientRect().left - map.getBoundingClientRect().left;
    tip.style.left = `${Math.max(0, Math.min(left + 12, map.clientWidth - tip.offsetWidth))}px`;
    const below = row.offsetTop + row.offsetHeight + 4;
    const fits = below + tip.offsetHeight <= map.offsetHeight || row.offsetTop < tip.offsetHeight;
    tip.style.top = `${fits ? below : row.offsetTop - tip.offsetHeight - 4}px`;
  };
  const hide = () => {
    tip.hidden = true;
    map.querySelectorAll("i.at").forEach((one) => one.classList.remove("at"));
  };
  const columnAt = (cells, event) => {
    const box = cells.getBoundingClientRect();
    const part = (event.clientX - box.left) / Math.max(box.width, 1);
    return Math.max(0, Math.min(data.columns.length - 1, Math.floor(part * data.columns.length)));
  };

  const chosen = data.keys.indexOf(data.chosen);
  const rows = data.rows.map((told, number) => {
    const row = element("div", "row");
    const name = element("button", "name", told.name);
    name.type = "button";
    name.tabIndex = -1;
    name.title = told.hint;
    name.style.setProperty("--depth", Math.min(Number(told.depth), DEEPEST));
    name.onclick = () => pick(number, told.worst);
    const cells = cellsOf(told, chosen);
    cells.onpointermove = (event) => show(number, columnAt(cells, event));
    cells.onpointerleave = hide;
    cells.onclick = (event) => pick(number, columnAt(cells, event));
    row.append(name, cells);
    return row;
  });
  const foot = element("div", "row");
  const ticks = element("div", "ticks");
  data.ticks.forEach(([place, words], number) => {
    const tick = element("span", number ? "" : "left", words);
    tick.style.left = `${number ? 100 * Number(place) : 0}%`;
    ticks.append(tick);
  });
  foot.append(ticks);
  map.setAttribute("aria-label", data.label);
  map.onblur = hide;
  map.onkeydown = (event) => {
    const [number, at] = cursor() || [0, data.columns.length - 1];
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key in moves) {
      const [down, right] = cursor() && !tip.hidden ? moves[event.key] : [0, 0];
      const to = [number + down, at + right];
      if (to[0] >= 0 && to[0] < rows.length && to[1] >= 0 && to[1] < data.columns.length) show(...to);
    } else if (event.key === "Enter" && !tip.hidden) pick(number, at);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  map.replaceChildren(...rows, foot, keyOf(data), tip);
}

// A table that can be sorted, filtered, unfolded, copied and saved. Everything that is shown is set as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const FEW = 8; // rows that need no filter
const LONG = 160; // characters from which on a cell shows its first lines; all of it can be copied
const ONE_LINE = 26; // characters up to which a cell does not wrap
const MANY = 5; // columns beyond which a row becomes a list where the window is narrow
const WIDE = 8; // columns beyond which all of it is set closer
const AS_LISTS = 8; // rows of such lists before a button that shows the rest
const narrow = matchMedia("(max-width: 640px)");

function button(kind, text, id, press) {
  const one = element("button", kind, text);
  one.type = "button";
  one.dataset.id = id;
  one.onclick = press;
  return one;
}

const plain = (cell) => (typeof cell === "string" ? cell : cell[0]);
const key = (cell) => (typeof cell === "string" || cell[1] === null ? null : cell[1]);

// What is empty comes last whichever way it is sorted; numbers inside of text count as numbers.
function compare(one, other, down) {
  const [a, b] = [plain(one), plain(other)];
  if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1);
  const [x, y] = [key(one), key(other)];
  const found = x !== null && y !== null ? x - y : (x === null) - (y === null) || a.localeCompare(b, "en", { numeric: true });
  return down ? -found : found;
}

// The text with what was searched in it marked; long names may break after a dot or a slash, numbers never.
function words(text, searched) {
  const breaks = text.length > ONE_LINE ? /(?<=[./])(?=[^\d\s])(?!py\b)/ : /(?!)/;
  const all = document.createDocumentFragment();
  const low = text.toLowerCase();
  let at = 0;
  const add = (part, into) =>
    part.split(breaks).forEach((piece, number) => into.append(...(number ? [element("wbr"), piece] : [piece])));
  for (let hit = searched ? low.indexOf(searched) : -1; hit >= 0; hit = low.indexOf(searched, at)) {
    add(text.slice(at, hit), all);
    const mark = element("mark");
    add(text.slice(hit, hit + searched.length), mark);
    all.append(mark);
    at = hit + searched.length;
  }
  add(text.slice(at), all);
  return all;
}

// A curve as small as a word; what is not finite is a stroke through its whole height.
function curve(heights) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 -6 ${Math.max(heights.length - 1, 1)} 112`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "curve");
  svg.setAttribute("aria-hidden", "true");
  const path = (kind, drawn) => {
    const one = document.createElementNS(SVG, "path");
    one.setAttribute("class", kind);
    one.setAttribute("d", drawn);
    svg.append(one);
  };
  const good = heights.map((height, x) => [x, 100 - Number(height)]).filter(([, y]) => y <= 100);
  if (good.length) path("", `M${good.map((point) => point.join(" ")).join("L")}${good.length > 1 ? "" : "h.01"}`);
  path("bad", heights.map((height, x) => (height < 0 ? `M${x} 0V100` : "")).join(""));
  return svg;
}

function inside(cell, searched) {
  if (typeof cell === "string") return [words(cell, searched)];
  const [text, , kind, part, heights] = cell;
  const shown = element("span", kind ? `amp-chip ${kind}` : "");
  shown.append(words(text, searched));
  if (heights) return [curve(heights), shown];
  if (part === null || part === undefined) return [shown];
  const bar = element("span", "part");
  const full = element("i");
  full.style.width = `${100 * Number(part)}%`;
  bar.append(full);
  bar.setAttribute("aria-hidden", "true");
  return [bar, shown];
}

// Rows in the order asked for, those of a fold together: [{ fold, rows }].
function ordered(data, view) {
  const searched = view.filter.toLowerCase();
  const matches = (at) => !searched || data.rows[at].some((cell) => plain(cell).toLowerCase().includes(searched));
  const entries = [];
  const starts = new Map(data.folds.map(([first, last], number) => [first, [last, number]]));
  for (let at = 0; at < data.rows.length; at += 1) {
    const [last, fold] = starts.get(at) || [at, -1];
    const rows = [];
    for (; at < last; at += 1) rows.push(at);
    const kept = [...rows, last].filter(matches);
    if (kept.length) entries.push({ fold: kept.length > 1 ? fold : -1, rows: kept });
  }
  if (view.sort < 0) return entries;
  const by = (a, b) => compare(data.rows[a][view.sort], data.rows[b][view.sort], view.down);
  entries.forEach((entry) => entry.rows.sort(by));
  return entries.sort((a, b) => by(a.rows[0], b.rows[0]));
}

// Cells that a spreadsheet would take for a formula are told apart from numbers.
function field(cell, numeric) {
  const known = key(cell);
  const text = numeric && known !== null ? String(known) : plain(cell);
  return !numeric && /^[=+\-@\t]/.test(text) ? `'${text}` : text;
}

function table(data, rows, separator, quoted) {
  const line = (cells) => cells.map(quoted).join(separator);
  const body = rows.map((at) => line(data.rows[at].map((cell, column) => field(cell, data.numeric[column]))));
  return [line(data.columns), ...body].join("\n");
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".amp-data");
  const view = (root.view ??= { sort: -1, down: false, filter: "", open: new Set(), all: false });
  if (view.data === JSON.stringify(data)) return;
  view.data = JSON.stringify(data);
  if (view.sort >= data.columns.length) view.sort = -1;

  const filter = element("input");
  filter.type = "search";
  filter.placeholder = "Filter";
  filter.dataset.id = "filter";
  filter.setAttribute("aria-label", `Filter: ${data.label}`);
  filter.value = view.filter;
  filter.hidden = !data.filters || (data.rows.length <= FEW && !view.filter);
  filter.oninput = () => {
    view.filter = filter.value.trim();
    draw();
  };
  filter.onkeydown = (event) => event.stopPropagation(); // the page's own keys are letters
  const scroll = element("div", "amp-scroll");
  const foot = element("footer");
  const said = element("span", "amp-said");
  said.setAttribute("role", "status");

  const change = (what) => {
    what();
    draw();
  };
  const heads = () => {
    const row = element("tr");
    data.columns.forEach((name, column) => {
      const head = element(name ? "th" : "td", data.numeric[column] ? "num" : "");
      if (name) head.scope = "col";
      if (view.sort === column) head.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      const sort = () => {
        const again = view.sort === column;
        if (again && view.down) [view.sort, view.down] = [-1, false]; // a third time: as it was
        else [view.sort, view.down] = [column, again];
      };
      if (name) head.append(button("", name, `sort ${column}`, () => change(sort)));
      row.append(head);
    });
    const thead = element("thead");
    thead.append(row);
    return thead;
  };
  const cellOf = (at, column) => {
    const cell = data.rows[at][column];
    const many = data.columns.length > MANY;
    const kind = Array.isArray(cell) && cell[4] ? "drawn" : plain(cell).length <= ONE_LINE ? "one-line" : "long";
    const one = element("td", `${data.numeric[column] ? "num " : ""}${kind}`);
    if (many) one.dataset.column = data.columns[column];
    const shown = inside(cell, view.filter.toLowerCase());
    if (plain(cell).length <= LONG) return [one, shown];
    const whole = element("span", "whole");
    whole.title = plain(cell);
    whole.append(...shown);
    return [one, [whole]];
  };
  const leading = (at, shown) => {
    if (data.links[at]) {
      const link = element("a", "amp-go");
      link.href = data.links[at];
      link.target = "_self";
      link.dataset.id = `go ${at}`;
      link.append(...shown);
      link.onclick = (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab or window
        event.preventDefault();
        setTriggerValue("row", at);
      };
      return [link];
    }
    if (!data.picks) return shown;
    const pick = button("go", undefined, `go ${at}`, () => setTriggerValue("row", at));
    pick.append(...shown);
    return [pick];
  };
  const rowOf = (at, kind) => {
    const row = element("tr", kind);
    data.columns.forEach((_, column) => {
      const [cell, shown] = cellOf(at, column);
      cell.append(...(column ? shown : leading(at, shown)));
      row.append(cell);
    });
    return row;
  };
  const foldOf = (entry) => {
    const by = data.columns.indexOf(data.fold);
    const ends = [entry.rows[0], entry.rows.at(-1)].map((at) => data.rows[at][by]).sort((a, b) => compare(a, b, false));
    const name = `${entry.rows.length.toLocaleString("en")} ${data.fold.toLowerCase()}s like this, ${ends.map(plain).join("\u2013")}`;
    const isOpen = view.open.has(entry.fold);
    const press = () => change(() => (isOpen ? view.open.delete(entry.fold) : view.open.add(entry.fold)));
    const toggle = button("unfold", name, `fold ${entry.fold}`, press);
    toggle.setAttribute("aria-expanded", String(isOpen));
    const row = element("tr");
    data.columns.forEach((_, column) => {
      const [cell, shown] = cellOf(entry.rows[0], column);
      if (column === by) cell.className = "";
      cell.append(...(column === by ? [toggle] : shown));
      row.append(cell);
    });
    return isOpen ? [row, ...entry.rows.map((at) => rowOf(at, "within"))] : [row];
  };

  const draw = () => {
    const held = root.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
    const entries = ordered(data, view);
    const drawn = entries.flatMap((entry) => (entry.fold < 0 ? entry.rows.map((at) => rowOf(at, "")) : foldOf(entry)));
    const body = element("tbody");
    const shown = data.columns.length > MANY && narrow.matches ? AS_LISTS : data.shown;
    const few = view.all || drawn.length <= shown + 3 ? drawn : drawn.slice(0, shown);
    body.append(...few);
    const kinds = [data.columns.length > MANY && "many", data.columns.length > WIDE && "wide"].filter(Boolean);
    const whole = element("table", ["amp-table", ...kinds].join(" "));
    whole.setAttribute("aria-label", data.label);
    whole.append(heads(), body);
    scroll.replaceChildren(whole);
    const rows = entries.flatMap((entry) => entry.rows);
    const part = rows.length < data.rows.length ? `${rows.length.toLocaleString("en")} of ` : "";
    const left = data.left ? `, and ${data.left.toLocaleString("en")} more that are not shown` : "";
    const total = `${part}${data.rows.length.toLocaleString("en")} row${data.rows.length === 1 ? "" : "s"}${left}`;
    foot.replaceChildren(element("span", "", total));
    if (few.length < drawn.length || (view.all && drawn.length > shown + 3)) {
      const more = view.all ? "Show fewer" : `Show ${(drawn.length - few.length).toLocaleString("en")} more`;
      foot.append(button("more", more, "more", () => change(() => (view.all = !view.all))));
    }
    const copy = () =>
      navigator.clipboard
        .writeText(table(data, rows, "\t", (text) => text.replaceAll(/[\t\n]/g, " ")))
        .then(() => (said.textContent = "Copied"), () => (said.textContent = "The browser does not allow to copy"));
    foot.append(button("", "Copy", "copy", copy), button("", "CSV", "save", () => save(rows)), said);
    foot.querySelector("[data-id=copy]").setAttribute("aria-label", `Copy: ${data.label}`);
    foot.querySelector("[data-id=save]").setAttribute("aria-label", `CSV: ${data.label}`);
    if (held && held !== "filter") root.querySelector(`[data-id="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
  };
  const save = (rows) => {
    const text = table(data, rows, ",", (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value));
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${data.label.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  const filtering = document.activeElement === root.querySelector("input") && root.contains(document.activeElement);
  root.replaceChildren(filter, scroll, foot);
  draw();
  if (filtering) filter.focus({ preventScroll: true });
}

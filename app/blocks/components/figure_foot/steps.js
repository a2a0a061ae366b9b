// What a figure over steps has beside Plotly's own: one crosshair with the values of all panels, over every such figure of
// the page, and one range of steps, which a zoom chooses. Everything that is shown is set as text.
const CROSS = "ampscope-step-pointed-at";
const RANGE = "ampscope-steps-chosen";

const plotOf = (key) => document.querySelector(`.st-key-${CSS.escape(key)} .js-plotly-plot`);
const axisOf = (plot) => plot._fullLayout?.xaxis;
const plain = (label) => label.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&quot;/g, '"').replace(/&amp;/g, "&");

function nearest(xs, step) {
  let best = -1;
  for (let at = 0; at < (xs?.length || 0); at += 1) {
    if (xs[at] !== null && (best < 0 || Math.abs(xs[at] - step) < Math.abs(xs[best] - step))) best = at;
  }
  return best;
}

const curvesOf = (plot) =>
  plot._fullData.filter((one) => one.hoverinfo === "none" && one.visible === true && one.customdata);

function chip(words, left, top, width) {
  const one = element("span", "", words);
  Object.assign(one.style, {
    position: "absolute", top: `${top}px`, padding: "0 5px", borderRadius: "4px", whiteSpace: "nowrap",
    font: "12px/18px ui-monospace, monospace", background: getComputedStyle(document.querySelector(".stApp")).backgroundColor,
    boxShadow: "0 0 0 1px color-mix(in srgb, currentColor 25%, transparent)",
    [left > width / 2 ? "right" : "left"]: `${(left > width / 2 ? width - left : left) + 6}px`,
  });
  return one;
}

// The line through all panels, and beside it what each curve says at the nearest step.
function draw(plot, step) {
  plot.querySelector(":scope > .amp-cross")?.remove();
  const axis = axisOf(plot);
  if (step === null || !axis) return;
  const at = axis.d2p(step);
  if (at < 0 || at > axis._length) return;
  const cross = element("div", "amp-cross");
  const size = plot._fullLayout._size;
  Object.assign(cross.style, { position: "absolute", inset: "0", pointerEvents: "none", overflow: "hidden" });
  const line = element("i", "");
  Object.assign(line.style, {
    position: "absolute", left: `${axis._offset + at}px`, top: `${size.t}px`, height: `${size.h}px`,
    borderLeft: "1px solid currentColor", opacity: "0.45",
  });
  cross.append(line, chip(`step ${Math.round(step).toLocaleString("en")}`, axis._offset + at, 2, plot.clientWidth));
  const rows = new Map();
  for (const curve of curvesOf(plot)) {
    const found = nearest(curve.x, step);
    const panel = plot._fullLayout[curve.yaxis.replace("y", "yaxis")];
    const row = rows.get(panel._offset) || 0;
    rows.set(panel._offset, row + 1);
    if (found < 0) continue;
    cross.append(chip(plain(String(curve.customdata[found])), axis._offset + at, panel._offset + 4 + 20 * row, plot.clientWidth));
  }
  plot.append(cross);
}

function pointed(plot, event) {
  const axis = axisOf(plot);
  if (!axis) return null;
  const at = event.clientX - plot.getBoundingClientRect().left - axis._offset;
  if (at < 0 || at > axis._length) return null;
  const curve = curvesOf(plot).find((one) => one.x?.length);
  const found = curve ? nearest(curve.x, axis.p2d(at)) : -1;
  return found < 0 ? Math.round(axis.p2d(at)) : curve.x[found];
}

// The steps that a zoom has left in sight: two numbers, "" for all, null where it was no zoom along the steps.
function zoomed(change) {
  for (const [name, value] of Object.entries(change)) {
    if (/^xaxis\d*\.autorange$/.test(name)) return "";
    if (/^xaxis\d*\.range$/.test(name)) return value.join(" ");
    if (/^xaxis\d*\.range\[0\]$/.test(name)) return `${value} ${change[name.replace("[0]", "[1]")]}`;
  }
  return null;
}

const tell = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

function listen(plot) {
  if (plot.ampscopeListens) return;
  plot.ampscopeListens = true;
  plot.addEventListener("pointermove", (event) => tell(CROSS, pointed(plot, event)));
  plot.addEventListener("pointerleave", () => tell(CROSS, null));
  plot.on("plotly_relayout", (change) => {
    const range = zoomed(change);
    if (range !== null) tell(RANGE, range);
  });
}

// Has the figure take part for as long as its foot is there.
function watchSteps(foot, data, setTriggerValue) {
  const prepare = () => {
    const plot = plotOf(data.figure);
    if (!plot?.on || !axisOf(plot)) return false;
    plot.setAttribute("role", data.clickable ? "group" : "img");
    plot.setAttribute("aria-label", data.label);
    listen(plot);
    return true;
  };
  foot.ampscopeStop?.(); // drawn anew, it listens once all the same
  const stopped = new AbortController();
  const arrival = new MutationObserver(() => prepare() && arrival.disconnect());
  if (!prepare()) arrival.observe(document.body, { childList: true, subtree: true });
  foot.ampscopeStop = () => {
    arrival.disconnect();
    stopped.abort();
  };
  const hear = (name, act) => {
    const heard = (event) => (foot.isConnected ? act(event.detail) : foot.ampscopeStop());
    document.addEventListener(name, heard, { signal: stopped.signal });
  };
  hear(CROSS, (step) => plotOf(data.figure) && draw(plotOf(data.figure), step));
  hear(RANGE, (range) => setTriggerValue("range", range || "all"));
  return foot.ampscopeStop;
}

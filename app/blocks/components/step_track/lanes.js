// The lanes of a track, from top to bottom.
const PARTED = 92; // pixels for the words at the first difference
function paintTrack(painter, track) {
  const { step, view, tops, context } = painter;
  painter.begin(GUTTER + view.width, painter.height);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, view.width, painter.height);
  context.clip();
  paintRuler(painter);
  paintModules(painter, track.at);
  painter.tones(step.tones, tops.ops + 1, step.lanes.ops - 3);
  if (step.otherTones) paintOther(painter);
  paintDtypes(painter);
  paintValues(painter);
  paintNames(painter);
  paintFound(painter);
  paintChosen(painter, track);
  context.restore();
  paintLaneNames(painter);
}

function paintLaneNames(painter) {
  painter.font(11);
  for (const [lane, words] of Object.entries(LANE_NAMES)) {
    const tall = painter.step.lanes[lane];
    const middle = lane === "modules" ? 8 : lane === "values" ? 8 : tall / 2;
    if (tall) painter.text(words, 2 - GUTTER, painter.tops[lane] + middle, GUTTER - 4);
  }
}

function paintRuler(painter) {
  const { step, view, colors } = painter;
  const least = (view.to - view.from) / (view.width / 90);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const every = [1, 2, 5, 10].map((times) => times * power).find((stride) => stride >= least) || 1;
  painter.font(10.5);
  const label = partedLabel(painter);
  for (let at = Math.ceil(view.from / every) * every; at < Math.min(view.to, view.count); at += every) {
    const x = view.x(at + 0.5);
    painter.line(x, step.lanes.ruler - 5, 4, colors.mark);
    if (!(x > label - 40 && x < label + PARTED)) painter.text(number(step.seq[at]), x + 3, step.lanes.ruler - 8, 80);
  }
  painter.font(11, 600);
  for (const [first, last, name] of step.phases) {
    const [begin, end] = [view.x(first), view.x(last + 1)];
    if (first) painter.line(begin, 0, painter.height, colors.mark);
    const from = Math.max(begin, 0) + 4;
    painter.text(name, from, 7, Math.min(end, view.width) - from - 4);
  }
}

function paintModules(painter, chosen) {
  const { step, view, tops, colors } = painter;
  const row = 16;
  painter.font(11);
  step.rows.forEach(([start, end], depth) => {
    const y = tops.modules + depth * row;
    let at = Math.max(above(step.spanFirst, view.from, start, end) - 1, start);
    while (at < end && step.spanFirst[at] < view.to) {
      const first = step.spanFirst[at];
      const last = first + step.spanOps[at];
      const x = Math.max(view.x(first), 0);
      const width = Math.min(view.x(last + 1), view.width) - x;
      const narrow = width < 1.5;
      if (width > 0) {
        const here = chosen >= first && chosen <= last;
        painter.fill(x, y, Math.max(width - (narrow ? 0 : 1), 1), row - 2, here ? colors.primary : colors.mark, here ? 0.3 : step.spanModule[at] % 2 ? 0.18 : 0.3);
        if (step.badBefore[last + 1] > step.badBefore[first]) painter.fill(x, y + row - 4, Math.max(width - 1, 2), 2, colors.alarm);
        const name = step.modules[step.spanModule[at]];
        if (width > 12) painter.text(name.slice(name.lastIndexOf(".") + 1), x + 4, y + 7, width - 8);
      }
      at = narrow ? Math.max(above(step.spanFirst, view.op(x + 1), at, end), at + 1) : at + 1;
    }
  });
}

function paintOther(painter) {
  const { step, view, tops, colors } = painter;
  painter.tones(step.otherTones, tops.other + 1, step.lanes.other - 4);
  painter.each((x, width, first, last) => {
    for (let at = first; at <= last; at++) {
      if (!(step.marks[at] & step.marksOf.PARTS)) continue;
      painter.fill(x, tops.other - 2, Math.max(Math.min(width, 6), 2), 3, colors.ink);
      break;
    }
  });
  if (step.parted === null) return;
  const x = view.x(step.parted);
  painter.line(x, 14, painter.height - 14, colors.ink, 1.5, [4, 3]);
  painter.font(11, 600);
  const from = partedLabel(painter);
  if (!Number.isNaN(from)) painter.text("here they part", from + 2, 20, PARTED);
}

// Where the words for the first difference begin, which no number of the ruler crosses; NaN where there is none.
function partedLabel({ step, view }) {
  const x = step.parted === null ? -1 : view.x(step.parted);
  if (x < 0 || x > view.width) return NaN;
  return x + PARTED > view.width ? x - PARTED : x + 3;
}

function paintDtypes(painter) {
  const { step, tops } = painter;
  painter.each((x, width, first) => {
    const dtype = step.dtypes[step.dtype[first] - 1];
    if (dtype) painter.fill(x, tops.dtypes + 1, width + 0.3, step.lanes.dtypes - 6, dtype[1]);
  });
}

// Where the values lie: at the upper edge a dtype overflows, at the lower one its values vanish.
function paintValues(painter) {
  const { step, tops, colors, context, view } = painter;
  const [y, tall] = [tops.values, step.lanes.values - 2];
  painter.fill(0, y, view.width, tall, colors.mark, 0.08);
  for (const edge of [y, y + tall]) painter.fill(0, edge - 0.5, view.width, 1, colors.mark, 0.7);
  const line = [];
  painter.each((x, width, first, last) => {
    let [top, low, other, bad] = [2, -1, 2, false];
    for (let at = first; at <= last; at++) {
      if (step.top[at] < top) top = step.top[at];
      if (step.low[at] > low) low = step.low[at];
      if (step.line[at] < other) other = step.line[at];
      bad ||= step.tones[at] === step.bad;
    }
    if (bad) painter.fill(x, y, Math.max(width, 2), tall, colors.alarm, 0.35);
    const dtype = step.dtypes[step.dtype[first] - 1];
    if (top <= 1) painter.fill(x, y + top * tall, width + 0.3, Math.max((low - top) * tall, 2), dtype ? dtype[1] : colors.mark);
    if (other <= 1) line.push([x, x + width, y + other * tall]);
  });
  context.strokeStyle = colors.ink;
  context.lineWidth = 1.2;
  context.beginPath();
  let end = null;
  for (const [x, next, height] of line) {
    if (end !== x) context.moveTo(GUTTER + x, height);
    context.lineTo(GUTTER + x, height);
    context.lineTo(GUTTER + next, height);
    end = next;
  }
  context.stroke();
}

function paintNames(painter) {
  const { step, view, tops } = painter;
  if (view.scale < 16) return;
  painter.font(11);
  const y = tops.ops + (step.lanes.ops - 2) / 2;
  painter.each((x, width, at) => {
    const from = Math.max(x, 0);
    const color = step.tones[at] === step.bad ? "#10161d" : painter.colors.ink;
    painter.text(step.ops[step.op[at]], from + 3, y, x + width - from - 6, color);
  });
}

function paintFound(painter) {
  const { step, tops, colors, view } = painter;
  const found = step.places.found;
  if (!found) return;
  let edge = -1;
  for (let at = above(found, view.from - 1); at < found.length && found[at] < view.to; at++) {
    const x = view.x(found[at]);
    if (x + Math.max(view.scale, 2) <= edge) continue;
    edge = x + Math.max(view.scale, 2);
    painter.fill(x, tops.ops - 1, Math.max(view.scale - 1, 2), 3, colors.primary);
  }
}

// The chosen op, its other half joined to it, and what the pointer is at.
function paintChosen(painter, track) {
  const { step, view, tops, colors, context } = painter;
  if (track.under !== null) painter.fill(view.x(track.under), 0, Math.max(view.scale, 1), painter.height, colors.ink, 0.12);
  if (track.at === null || !step.count) return;
  const middle = view.x(track.at + 0.5);
  painter.line(middle, 0, painter.height, colors.primary, 2);
  if (view.scale > 4) {
    context.strokeStyle = colors.ink;
    context.lineWidth = 2;
    context.strokeRect(GUTTER + view.x(track.at), tops.ops + 1, view.scale - 1, step.lanes.ops - 3);
  }
  context.lineWidth = 1.5;
  const y = tops.ops + 1;
  for (const other of track.halves) {
    const there = view.x(other + 0.5);
    const seen = there >= 0 && there <= view.width;
    const x = seen ? there : middle + Math.sign(there - middle) * 30; // off screen: an arc that points there
    if (seen) painter.line(x, y, painter.height - y, colors.ink, 1.5, [2, 3]);
    const up = seen ? 34 : 14;
    context.strokeStyle = colors.ink;
    context.beginPath();
    context.moveTo(GUTTER + middle, y);
    if (seen) context.bezierCurveTo(GUTTER + middle, y - up, GUTTER + x, y - up, GUTTER + x, y);
    else context.quadraticCurveTo(GUTTER + middle, y - up, GUTTER + x, y - up);
    context.stroke();
    painter.font(10.5);
    if (!seen) painter.text(there < middle ? "\u2190" : "\u2192", there < middle ? x - 9 : x - 1, y - up - 1, 20);
  }
  const last = view.x((track.halves.at(-1) ?? -1) + 0.5);
  if (last <= 0 || last >= view.width) return;
  painter.font(10.5);
  const words = step.back[track.at] ? "its forward (B)" : "its backward (B)";
  painter.halo(words, last + 92 > view.width ? last - 94 : last + 5, tops.values + step.lanes.values - 8, 92);
}

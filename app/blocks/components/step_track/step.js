// A step as typed arrays: what came deflated from the server, and what follows from it.
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array };
const UNKNOWN = 0xffff;
const PLAIN = 0; // tones: not known, not finite as intended, from plenty of headroom to none, and not finite
const INTENDED = 1;
const FARTHEST = 2;

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function padded(length) {
  return Math.ceil(length / 8) * 8;
}

function summed(differences) {
  for (let at = 1; at < differences.length; at++) differences[at] += differences[at - 1];
  return differences;
}

async function readStep(bytes) {
  const buffer = await inflated(bytes);
  const length = new DataView(buffer).getUint32(0, true);
  const step = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  let place = 8 + padded(length);
  for (const [name, kind, count] of step.columns) {
    const column = new KINDS[kind](buffer, place, count);
    step[name] = column;
    place += padded(column.byteLength);
  }
  summed(step.seq);
  summed(step.spanFirst);
  step.closest = FARTHEST + step.shades.length - 1;
  step.bad = step.closest + 1;
  step.tones = tonesOf(step, step.headroom, step.marks, step.marksOf.BAD);
  if (step.other) step.otherTones = tonesOf(step, step.other, step.marks, step.marksOf.OTHER_BAD);
  step.rows = rowsOf(step);
  step.badBefore = counted(step);
  step.places = placesOf(step);
  Object.assign(step, heightsOf(step));
  return step;
}

// One number for what an op looks like, so that of many ops in one pixel the greatest is drawn.
function tonesOf(step, headroom, marks, bad) {
  const own = headroom === step.headroom;
  const most = step.shades.length - 1;
  const tones = new Uint8Array(step.count);
  for (let at = 0; at < step.count; at++) {
    if (marks[at] & bad) tones[at] = step.bad;
    else if (own && marks[at] & step.marksOf.INTENDED) tones[at] = INTENDED;
    else if (headroom[at] !== UNKNOWN) {
      const over = !own && headroom[at] === 0; // the other step's value does not fit into this one's dtype
      tones[at] = over ? step.bad : FARTHEST + most - Math.min(headroom[at], most);
    }
  }
  return tones;
}

// Where the values lie within what their dtype holds: 0 where it overflows, 1 where they vanish; NaN where not known.
function heightsOf(step) {
  const part = (bits, at) => {
    const dtype = step.dtypes[step.dtype[at] - 1];
    return dtype && dtype[2] && bits !== UNKNOWN ? Math.min(bits / 4 / dtype[2], 1) : NaN;
  };
  const [top, low, line] = [0, 0, 0].map(() => new Float32Array(step.count).fill(NaN));
  for (let at = 0; at < step.count; at++) {
    top[at] = part(step.headroom[at], at);
    const spread = step.spread[at];
    low[at] = spread === UNKNOWN ? top[at] : part(step.headroom[at] + spread, at);
    if (step.other) line[at] = part(step.other[at], at);
  }
  return { top, low, line };
}

// The spans of each depth: where they begin and end among all.
function rowsOf(step) {
  const rows = [];
  step.spanDepth.forEach((depth, at) => {
    rows[depth] ??= [at, at];
    rows[depth][1] = at + 1;
  });
  return rows;
}

function counted(step) {
  const before = new Uint32Array(step.count + 1);
  for (let at = 0; at < step.count; at++) before[at + 1] = before[at] + (step.marks[at] & step.marksOf.BAD ? 1 : 0);
  return before;
}

function placesOf(step) {
  const where = (holds) => {
    const found = [];
    for (let at = 0; at < step.count; at++) if (holds(at)) found.push(at);
    return found;
  };
  const marked = (mark) => where((at) => step.marks[at] & mark);
  return {
    born: marked(step.marksOf.BORN),
    near: marked(step.marksOf.NEAR),
    cast: marked(step.marksOf.CAST),
    parts: marked(step.marksOf.PARTS),
    module: where((at) => at === 0 || step.module[at] !== step.module[at - 1]),
    found: null,
  };
}

// The first index from `start` on, before `end`, whose value is greater than `value`; the values ascend.
function above(values, value, start = 0, end = values.length) {
  while (start < end) {
    const middle = (start + end) >> 1;
    if (values[middle] <= value) start = middle + 1;
    else end = middle;
  }
  return start;
}

// The op of forward that one of backward belongs to, or the ops of backward that one of forward led to.
function otherHalves(step, at) {
  if (step.back[at]) return [at - step.back[at]];
  const found = [];
  for (let later = 0; later < step.count; later++) if (step.back[later] && later - step.back[later] === at) found.push(later);
  return found;
}

// Of some neighbouring ops the one that someone would want to land on.
function telling(step, first, last) {
  let best = first;
  const weight = (at) => step.tones[at] + (step.marks[at] & step.marksOf.BORN ? 256 : 0);
  for (let at = first + 1; at <= last; at++) if (weight(at) > weight(best)) best = at;
  return best;
}

function moduleOf(step, at) {
  return step.module[at] ? step.modules[step.module[at] - 1] : "";
}

function number(value) {
  return value.toLocaleString("en");
}

function stateOf(step, at) {
  const marks = step.marks[at];
  if (marks & step.marksOf.BORN) return "NaN or infinity begins here";
  if (marks & step.marksOf.BAD) return "not finite";
  if (marks & step.marksOf.INTENDED) return "not finite, as intended";
  return leftOf(step, at, step.headroom[at]);
}

// How far a value is from the end of what the op's dtype holds; nothing where that is not known, or plenty.
function leftOf(step, at, bits) {
  if (bits === UNKNOWN || bits > 4 * 60) return "";
  const times = Number((2 ** (bits / 4)).toPrecision(2));
  const left = bits < 4 ? "less than a factor of 2" : `a factor of about ${number(times)}`;
  return `${left} below what ${step.dtypes[step.dtype[at] - 1][0]} holds`;
}

// What the other step gave, against this one's dtype.
function otherWords(step, at) {
  const bits = step.other?.[at] ?? UNKNOWN;
  if (!step.other || (bits === UNKNOWN && !(step.marks[at] & step.marksOf.OTHER_BAD))) return "";
  if (step.marks[at] & step.marksOf.OTHER_BAD) return "the other step: not finite";
  if (bits === 0) return `the other step: more than ${step.dtypes[step.dtype[at] - 1][0]} holds`;
  const left = leftOf(step, at, bits);
  return left && `the other step: ${left}`;
}

// An op in words: what it is, where, in which dtype, and how close to its limit.
function opWords(step, at) {
  const dtype = step.dtype[at] ? step.dtypes[step.dtype[at] - 1][0] : "";
  const module = moduleOf(step, at);
  return [`${number(step.seq[at])}: ${step.ops[step.op[at]]}`, module && `in ${module}`, dtype, stateOf(step, at), otherWords(step, at)]
    .filter(Boolean)
    .join(", ");
}

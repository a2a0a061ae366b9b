// The track of a step: what is on screen, which op is chosen, and what is told of it.
const WHOLE_S = 45; // seconds in which playing goes through a step, unless it is short
const SLOWEST = 2.5; // ops a second, at normal speed
const AT_REST_MS = 100; // between two reports to the server
const PLAYING_MS = 400;
// The page's own cursor arrives in an element of its own, so that the step is sent once and not at each move.
const channel = (window.ampscopeReplay ??= Object.assign(new EventTarget(), { cursor: null }));

class Track {
  constructor(root) {
    const part = (name) => root.querySelector(name);
    Object.assign(this, { root, bar: part(".bar"), strip: part(".strip"), canvas: part(".lanes"), tip: part(".tip") });
    Object.assign(this, { said: part(".said"), told: part(".told"), brush: part(".brush"), key: part(".key") });
    Object.assign(this, { bytes: null, step: null, at: 0, moves: -1, under: null, halves: [], playing: false, speed: 1 });
    Object.assign(this, { reported: 0, waiting: 0, frame: 0, foundText: null });
    this.canvas.ampscopeShapes = () => this.step && this.shapes(new Painter(new ShapeCanvas(), this.step, this.view, this.painter.colors), (painter) => paintTrack(painter, this));
    this.strip.ampscopeShapes = () => this.step && this.shapes(new Painter(new ShapeCanvas(), this.step, this.overview.view, this.painter.colors), (painter) => this.paintStrip(painter));
    fillBar(this, this.bar);
    watchTrack(this, this.canvas);
    watchStrip(this, this.strip);
    const follow = () => this.follow();
    channel.addEventListener("cursor", follow);
    const resize = new ResizeObserver(() => this.draw());
    resize.observe(root);
    const unwatchKeys = watchKeys(this);
    this.close = () => {
      channel.removeEventListener("cursor", follow);
      resize.disconnect();
      unwatchKeys();
      clearTimeout(this.waiting);
      this.playing = false;
      delete root.track;
    };
  }

  // Takes a step; the same one again, as at every move of the cursor, costs a comparison.
  async load(bytes) {
    const known = this.bytes;
    this.bytes = bytes;
    if (known && known.length === bytes.length && known.every((each, at) => each === bytes[at])) return this.paintAnew();
    this.canvas.style.height = `${bytes[0] + 256 * bytes[1]}px`;
    const step = await readStep(bytes.subarray(2));
    if (this.bytes !== bytes) return;
    const again = this.step?.name === step.name;
    this.step = step;
    if (!again) Object.assign(this, { view: new View(step.count), at: 0, moves: -1, foundText: null, playing: false });
    else if (this.foundText !== null) this.foundText = null;
    this.canvas.parentElement.setAttribute("aria-label", step.label);
    this.paintAnew();
    this.root.classList.add("drawn");
    this.follow();
    writeBar(this, this.bar);
    writePlayer(this, this.bar);
    this.settle(this.at);
  }

  // Colours follow the theme.
  paintAnew() {
    if (!this.step) return;
    const colors = colorsOf(this.root);
    const look = JSON.stringify(colors);
    if (this.painter?.step === this.step && this.look === look) return;
    this.look = look;
    this.painter = new Painter(this.canvas, this.step, this.view, colors);
    this.overview = new Painter(this.strip, this.step, new View(this.step.count), colors);
    writeKey(this, this.key);
    this.draw();
  }

  // Goes where the page's cursor went by itself; what was chosen here it only repeats.
  async follow() {
    const cursor = channel.cursor;
    if (!cursor || !this.step || cursor.step !== this.step.name) return;
    if (cursor.moves !== this.moves) {
      this.moves = cursor.moves;
      this.playing = false;
      this.settle(cursor.at);
    }
    if (cursor.found === this.foundText) return;
    this.foundText = cursor.found;
    this.step.places.found = cursor.found === null ? null : await foundIn(cursor.found, this.step.count);
    writeBar(this, this.bar);
    this.draw();
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = 0;
    const width = this.root.clientWidth - GUTTER;
    if (!this.step || width <= 0) return;
    const { view, overview } = this;
    view.width = width;
    if (overview.view.width !== width || !overview.drawn) {
      overview.view.width = width;
      this.paintStrip(overview);
      overview.drawn = true;
    }
    paintTrack(this.painter, this);
    const share = (ops) => `${(100 * ops) / Math.max(view.count, 1)}%`;
    Object.assign(this.brush.style, { left: share(view.from), width: share(view.to - view.from) });
  }

  // The whole step above the lanes.
  paintStrip(painter) {
    painter.begin(GUTTER + painter.view.width, this.strip.clientHeight);
    painter.tones(this.step.tones, 4, this.strip.clientHeight - 8);
  }

  // What a painter paints, for a picture of what is in view.
  shapes(painter, paint) {
    paint(painter);
    return painter.context.shapes;
  }

  // Chooses an op, as with a click or a key, and tells the page.
  choose(at) {
    this.playing = false;
    writePlayer(this, this.bar);
    this.settle(at);
    this.report();
  }

  settle(at) {
    const { step } = this;
    this.at = Math.max(Math.min(at, step.count - 1), 0);
    if (step.count) {
      this.halves = otherHalves(step, this.at);
      this.view.show(this.at);
      const words = `Op ${number(this.at + 1)} of ${number(step.count)}, number ${opWords(step, this.at)}`;
      this.told.textContent = words;
      if (!this.playing) this.said.textContent = words;
    }
    this.draw();
  }

  report() {
    clearTimeout(this.waiting);
    const rest = this.reported + (this.playing ? PLAYING_MS : AT_REST_MS) - performance.now();
    if (rest > 0) {
      this.waiting = setTimeout(() => this.report(), rest);
      return;
    }
    this.reported = performance.now();
    this.send({ step: this.step.name, at: this.at, playing: this.playing });
  }

  // To the next of certain places, after the last to the first; backwards likewise.
  jump(places, direction) {
    const known = this.step.places[places];
    if (!known?.length) return;
    const later = above(known, this.at);
    const earlier = above(known, this.at - 1) - 1;
    this.choose(direction > 0 ? known[later % known.length] : known[(earlier + known.length) % known.length]);
  }

  play() {
    this.playing = !this.playing;
    writePlayer(this, this.bar);
    if (!this.playing) return this.report();
    if (this.at >= this.step.count - 1) this.settle(0);
    let [place, before] = [this.at, performance.now()];
    const beat = (now) => {
      if (!this.playing) return;
      const { step } = this;
      place += (Math.max(step.count / WHOLE_S, SLOWEST) * this.speed * (now - before)) / 1000;
      before = now;
      const bad = step.places.born;
      const stop = Math.min(bad[above(bad, this.at)] ?? step.count - 1, step.count - 1);
      const at = Math.min(Math.floor(place), stop);
      if (at === stop) return this.choose(stop);
      if (at !== this.at) {
        this.settle(at);
        this.report();
      }
      requestAnimationFrame(beat);
    };
    requestAnimationFrame(beat);
  }

  // What is under the pointer: a module's span, or the op that matters most in this pixel; null for nothing.
  target(x, y) {
    const { step, view, painter } = this;
    const under = step && x >= 0 && view.under(x);
    if (!under) return null;
    const depth = Math.floor((y - painter.tops.modules) / 16);
    const row = y >= painter.tops.modules && y < painter.tops.ops ? step.rows[depth] : null;
    if (!row) return { at: telling(step, ...under), span: null };
    const span = above(step.spanFirst, under[1], ...row) - 1;
    const last = step.spanFirst[span] + step.spanOps[span];
    if (span < row[0] || last < under[0]) return { at: telling(step, ...under), span: null };
    return { at: step.spanFirst[span], span: [step.spanFirst[span], last], name: step.modules[step.spanModule[span]] };
  }

  hover(x, y) {
    const target = x === null ? null : this.target(x, y);
    this.under = target && !target.span ? target.at : null;
    this.tip.hidden = !target;
    if (target) {
      const count = target.span ? target.span[1] - target.span[0] + 1 : 0;
      this.tip.textContent = target.span ? `${target.name}: ${number(count)} op${count === 1 ? "" : "s"}` : opWords(this.step, target.at);
      const room = this.root.clientWidth - this.tip.offsetWidth;
      this.tip.style.left = `${Math.max(0, Math.min(GUTTER + x + 14, room))}px`;
        this.tip.style.top = `${this.canvas.parentElement.offsetTop + this.painter.height}px`; // below what it tells of
    }
    this.draw();
  }
}

async function foundIn(text, count) {
  const bytes = new Uint8Array(await inflated(Uint8Array.from(atob(text), (each) => each.charCodeAt(0))));
  const found = [];
  for (let at = 0; at < count; at++) if (bytes[at >> 3] & (1 << (at & 7))) found.push(at);
  return found;
}

// What the colours mean.
function writeKey(track, key) {
  const { step } = track;
  const one = (words, color, image = "", kind = "") => {
    const item = document.createElement("span");
    item.className = kind;
    const swatch = document.createElement("i");
    swatch.style.background = image || color;
    item.append(swatch, words);
    return item;
  };
  const hatch = "repeating-linear-gradient(135deg, var(--amp-mark, #8a94a0) 0 1.2px, transparent 1.2px 4px)";
  const shade = (part) => `color-mix(in srgb, var(--amp-heat, #8f5fd7) ${FULLEST * part}%, transparent)`;
  const ramp = one(`${(step.shades.length - 1) / 4} doublings`, "", `linear-gradient(90deg, ${shade(step.shades[0])}, ${shade(step.shades.at(-1))})`);
  ramp.prepend("headroom: none");
  ramp.querySelector("i").style.width = "48px";
  key.replaceChildren(
    ramp,
    one("NaN or inf", "var(--amp-alarm, #d55e00)"),
    one("intended", "", hatch),
    ...(step.other ? [one("the other step", "currentColor", "", "thin")] : []),
    one("not known", "color-mix(in srgb, var(--amp-mark, #8a94a0) 30%, transparent)", "", "more"),
    ...step.dtypes.map(([name, color]) => one(name, color, "", "more")),
  );
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".track");
  const track = (root.track ??= new Track(root));
  track.send = (told) => setTriggerValue("picked", told);
  track.load(data);
  return () => track.close();
}

// Draws the lanes of a track: only what is on screen, and of many ops in one pixel the one that matters most.
const GUTTER = 74; // pixels at the left, for the names of the lanes
const FULLEST = 0.85; // of a shade, so that a name on it can be read
const LANE_NAMES = { modules: "modules", ops: "ops", other: "other step", dtypes: "dtype", values: "magnitudes" };

function colorsOf(root) {
  const style = getComputedStyle(root);
  const color = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: color("--st-text-color", "#10161d"),
    paper: color("--st-background-color", "#ffffff"),
    primary: color("--st-primary-color", "#0072b2"),
    alarm: color("--amp-alarm", "#d55e00"),
    heat: color("--amp-heat", "#8f5fd7"),
    mark: color("--amp-mark", "#8a94a0"),
    curve: color("--amp-curve", "#7a8ca3"),
    font: color("--st-font", "sans-serif"),
  };
}

class Painter {
  constructor(canvas, step, view, colors) {
    this.context = canvas.getContext("2d");
    Object.assign(this, { canvas, step, view, colors, widths: new Map() });
    this.tops = {};
    let top = 0;
    for (const [name, height] of Object.entries(step.lanes)) {
      this.tops[name] = top;
      top += height;
    }
    this.height = top;
    this.hatch = this.hatching();
  }

  hatching() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const context = tile.getContext("2d");
    context.strokeStyle = this.colors.mark;
    context.lineWidth = 1.2;
    for (const shift of [-6, 0, 6]) {
      context.moveTo(shift, 6);
      context.lineTo(shift + 6, 0);
    }
    context.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  // Makes room for so many pixels, whatever the screen's own are, and clears them.
  begin(width, height) {
    const ratio = window.devicePixelRatio || 1;
    const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== across || this.canvas.height !== down) Object.assign(this.canvas, { width: across, height: down });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
    this.context.textBaseline = "middle";
    this.font(11);
  }

  font(size, weight = 400) {
    this.context.font = `${weight} ${size}px ${this.colors.font}`;
  }

  fill(x, y, width, height, color, alpha = 1) {
    this.context.globalAlpha = alpha;
    this.context.fillStyle = color;
    this.context.fillRect(GUTTER + x, y, width, height);
    this.context.globalAlpha = 1;
  }

  line(x, y, height, color, width = 1, dash = []) {
    const pen = this.context;
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(GUTTER + x, y);
    pen.lineTo(GUTTER + x, y + height);
    pen.stroke();
    pen.setLineDash([]);
  }

  // Text where all of it fits; nothing else.
  text(words, x, y, room, color = this.colors.ink) {
    const key = `${this.context.font}${words}`;
    if (!this.widths.has(key)) this.widths.set(key, this.context.measureText(words).width);
    if (this.widths.get(key) > room) return false;
    this.context.fillStyle = color;
    this.context.fillText(words, GUTTER + x, y);
    return true;
  }

  // Text on what is drawn already, with the ground around its letters.
  halo(words, x, y, room) {
    Object.assign(this.context, { strokeStyle: this.colors.paper, lineWidth: 4, lineJoin: "round" });
    this.context.strokeText(words, GUTTER + x, y);
    return this.text(words, x, y, room);
  }

  tone(tone) {
    const { colors, step } = this;
    if (tone === step.bad) return [colors.alarm, 1];
    if (tone === PLAIN) return [colors.mark, 0.3];
    if (tone === INTENDED) return [this.hatch, 1];
    return [colors.heat, (FULLEST * step.shades[step.closest - tone]) / 100];
  }

  // Calls `draw(x, width, first, last)` for each op on screen, or for each pixel where there are more ops than these.
  each(draw) {
    const { view } = this;
    if (view.scale >= 1) {
      const last = Math.min(Math.ceil(view.to), view.count);
      for (let at = Math.max(Math.floor(view.from), 0); at < last; at++) draw(view.x(at), view.scale, at, at);
      return;
    }
    for (let x = 0; x < view.width; x++) {
      const under = view.under(x);
      if (under) draw(x, 1, ...under);
    }
  }

  tones(tones, y, height) {
    const bad = [];
    let run = null; // of pixels that look the same
    const paint = () => run && run.tone !== this.step.bad && this.fill(run.x, y, run.width, height, ...this.tone(run.tone));
    this.each((x, width, first, last) => {
      let tone = tones[first];
      for (let at = first + 1; at <= last; at++) if (tones[at] > tone) tone = tones[at];
      if (tone === this.step.bad) bad.push([x, width]);
      const gap = width > 4 ? 1 : 0;
      if (run && !gap && run.tone === tone) run.width = x + width - run.x;
      else {
        paint();
        run = { x, width: width - gap, tone };
      }
    });
    paint();
    for (const [x, width] of bad) this.fill(x, y, Math.max(width - (width > 4 ? 1 : 0), 2), height, this.colors.alarm);
  }
}

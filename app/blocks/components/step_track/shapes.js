// Stands in for a canvas and its pen, and keeps what is painted as shapes of SVG.
class ShapeCanvas {
  constructor() {
    Object.assign(this, { width: 0, height: 0, globalAlpha: 1, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "400 11px sans-serif" });
    Object.assign(this, { shapes: [], way: "", dash: "", hatch: null, ruler: document.createElement("canvas").getContext("2d") });
  }

  getContext() {
    return this;
  }

  put(tag, attributes, text) {
    const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== "") one.setAttribute(name, typeof value === "number" ? Math.round(value * 100) / 100 : value);
    if (text) one.textContent = text;
    this.shapes.push(one);
    return one;
  }

  paint(style) {
    return style === this.hatch ? "url(#track-hatch)" : style;
  }

  createPattern(tile) {
    this.hatch = this.put("pattern", { id: "track-hatch", width: tile.width, height: tile.height, patternUnits: "userSpaceOnUse" });
    this.put("image", { width: tile.width, height: tile.height, href: tile.toDataURL() });
    this.hatch.append(this.shapes.pop());
    return this.hatch;
  }

  measureText(words) {
    this.ruler.font = this.font;
    return this.ruler.measureText(words);
  }

  fillRect(x, y, width, height) {
    this.put("rect", { x, y, width, height, fill: this.paint(this.fillStyle), opacity: this.globalAlpha < 1 ? this.globalAlpha : "" });
  }

  strokeRect(x, y, width, height) {
    this.put("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }

  fillText(words, x, y) {
    const [, weight, size, family] = /^(\d+) ([\d.]+)px (.*)$/.exec(this.font);
    const font = { "font-family": family, "font-size": `${size}px`, "font-weight": weight === "400" ? "" : weight };
    const width = { textLength: this.measureText(words).width, lengthAdjust: "spacingAndGlyphs" };
    this.put("text", { x, y, "dominant-baseline": "central", fill: this.fillStyle, ...font, ...width }, words);
  }

  strokeText(words, x, y) {
    this.fillText(words, x, y);
    const style = { fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-linejoin": "round" };
    for (const [name, value] of Object.entries(style)) this.shapes.at(-1).setAttribute(name, value);
  }

  rect(x, y, width, height) {
    this.way += `M${x} ${y}h${width}v${height}h${-width}z`;
  }

  clip() {
    const clip = this.put("clipPath", { id: "track-lanes" });
    this.put("path", { d: this.way });
    clip.append(this.shapes.pop());
    this.clipped = this.shapes.length;
  }

  restore() {
    const group = this.put("g", { "clip-path": "url(#track-lanes)" });
    group.append(...this.shapes.splice(this.clipped, this.shapes.length - 1 - this.clipped));
  }

  stroke() {
    if (this.way) this.put("path", { d: this.way, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-dasharray": this.dash });
  }

  beginPath() {
    this.way = "";
  }

  setLineDash(dash) {
    this.dash = dash.join(" ");
  }

  to(letter, points) {
    this.way += letter + points.map((point) => Math.round(point * 100) / 100).join(" ");
  }

  moveTo(...points) {
    this.to("M", points);
  }

  lineTo(...points) {
    this.to("L", points);
  }

  bezierCurveTo(...points) {
    this.to("C", points);
  }

  quadraticCurveTo(...points) {
    this.to("Q", points);
  }

  save() {}

  setTransform() {}

  clearRect() {}
}

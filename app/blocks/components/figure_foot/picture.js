// A part of the page as a picture that is readable by itself: a title, and below it what is on screen as shapes and text.
const LEFT_OUT = ".amp-hint, .foot, .tip, .bar, .said, .amp-cross, .hoverlayer, .zoomlayer, .draglayer, .modebar-container, [data-testid=stElementToolbar], style, script, template";
const INHERITED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor"];
const MARGIN = 16;
const ruler = document.createElement("canvas").getContext("2d");

class Picture {
  constructor() {
    this.defs = node("defs");
    this.edges = [Infinity, Infinity, -Infinity, -Infinity];
    this.clips = [];
  }

  boxOf(rect) {
    return { x: rect.left, y: rect.top, width: rect.width, height: rect.height };
  }

  // What is painted makes the picture as large as it has to be, where nothing cuts it off.
  reach({ x, y, width, height }) {
    let [left, top, right, foot] = [x, y, x + width, y + height];
    for (const clip of this.clips) {
      [left, top] = [Math.max(left, clip.x), Math.max(top, clip.y)];
      [right, foot] = [Math.min(right, clip.x + clip.width), Math.min(foot, clip.y + clip.height)];
    }
    if (right < left || foot < top) return;
    const [x0, y0, x1, y1] = this.edges;
    this.edges = [Math.min(x0, left), Math.min(y0, top), Math.max(x1, right), Math.max(y1, foot)];
  }

  box(style, box) {
    if (box.width <= 0 && box.height <= 0) return [];
    const shapes = boxShapes(this.defs, style, box);
    if (shapes.length) this.reach(box);
    return shapes;
  }

  element(one) {
    if (one.matches(LEFT_OUT)) return [];
    const style = getComputedStyle(one);
    if (style.display === "none" || style.visibility === "hidden" || Number(style.opacity) === 0) return [];
    const box = this.boxOf(one.getBoundingClientRect());
    if (one.localName === "svg") return this.drawing(one, box);
    if (one.localName === "canvas") return this.canvas(one, box);
    const shapes = style.display === "contents" ? [] : this.box(style, box);
    const clipped = style.overflowX === "hidden" && style.display !== "inline";
    if (clipped) this.clips.push(box);
    const inside = this.inside(one, style, box);
    if (clipped) this.clips.pop();
    if (!inside.length && !shapes.length) return [];
    if (clipped && inside.length && (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight || one.querySelector("*"))) {
      const id = `clip-${this.defs.childElementCount}`;
      this.defs.append(node("clipPath", { id }, node("rect", { ...box, rx: parseFloat(style.borderTopLeftRadius) || undefined })));
      shapes.push(node("g", { "clip-path": `url(#${id})` }, ...inside));
    } else shapes.push(...inside);
    return Number(style.opacity) < 1 ? [node("g", { opacity: style.opacity }, ...shapes)] : shapes;
  }

  inside(one, style, box) {
    const closed = one.localName === "details" && !one.open;
    const children = [...(one.shadowRoot ?? one).childNodes].filter((child) => !closed || child.localName === "summary");
    const order = (child) => (child instanceof Element && Number(getComputedStyle(child).zIndex)) || 0;
    const drawn = children.sort((a, b) => order(a) - order(b)).flatMap((child) => {
      if (child.nodeType === Node.TEXT_NODE) return this.text(child, style);
      return child instanceof Element ? this.element(child) : [];
    });
    return [...this.generated(one, "::before", box), ...drawn, ...this.generated(one, "::after", box)];
  }

  // The text of a node line by line, each as wide as it is on screen whatever fonts the reader has.
  text(child, style) {
    if (!child.data.trim()) return [];
    const lines = [];
    const range = document.createRange();
    let at = 0;
    for (const letter of child.data) {
      range.setStart(child, at);
      range.setEnd(child, (at += letter.length));
      const rect = range.getClientRects()[0];
      if (!rect || !rect.width) continue;
      const last = lines.at(-1);
      if (last && Math.abs(last.box.y - rect.top) < 2) {
        last.words += letter;
        last.box.width = rect.right - last.box.x;
      } else lines.push({ words: letter, box: this.boxOf(rect) });
    }
    return lines.filter((line) => line.words.trim()).map((line) => this.words(line.words, style, line.box));
  }

  words(words, style, box) {
    ruler.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = ruler.measureText(words);
    this.reach(box);
    const baseline = box.y + (box.height - up - down) / 2 + up;
    const font = { "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight === "400" ? undefined : style.fontWeight };
    const kept = { "xml:space": /^\s|\s$|\s\s/.test(words) ? "preserve" : undefined };
    return node("text", { x: box.x, y: baseline, textLength: box.width, lengthAdjust: "spacingAndGlyphs", ...font, ...kept, ...painted("fill", style.color) }, words);
  }

  // What the style sheet adds before or after a text, or lays over a box.
  generated(one, which, box) {
    const style = getComputedStyle(one, which);
    if (style.content === "none" || style.content === "normal" || style.display === "none") return [];
    const words = /^"(.*?)"/s.exec(style.content)?.[1] ?? "";
    const size = { width: parseFloat(style.width) || 0, height: parseFloat(style.height) || 0 };
    if (style.position === "absolute") return this.box(style, { x: box.x + parseFloat(style.left), y: box.y + parseFloat(style.top), ...size });
    const range = document.createRange();
    range.selectNodeContents(one);
    const rects = [...range.getClientRects()].filter((rect) => rect.width > 0);
    ruler.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const own = words ? ruler.measureText(words).width : size.width + parseFloat(style.borderLeftWidth) + parseFloat(style.marginRight);
    const beside = which === "::before" ? rects[0] : rects.at(-1);
    const x = beside ? (which === "::before" ? beside.left - own : beside.right) : box.x + (box.width - own) / 2;
    if (words) return [this.words(words, style, { x, y: (beside ?? box).top ?? box.y, width: own, height: (beside ?? box).height })];
    return beside ? this.box(style, { x, y: beside.top + (beside.height - size.height) / 2, width: size.width + parseFloat(style.borderLeftWidth), height: size.height }) : [];
  }

  // A drawing in the page, with what the style sheet says of it written into it.
  drawing(one, box) {
    const copy = one.cloneNode(true);
    const [from, to] = [one, copy].map((each) => [each, ...each.querySelectorAll("*")]);
    from.forEach((each, at) => {
      if (each.hasAttribute("style") || each.closest("defs")) return;
      const [style, above] = [getComputedStyle(each), at ? getComputedStyle(each.parentElement) : null];
      for (const name of INHERITED) {
        const value = style.getPropertyValue(name);
        if (value !== above?.getPropertyValue(name)) to[at].setAttribute(name, /^(fill|stroke)$/.test(name) && value.startsWith("color(") ? colorOf(value)[0] : value);
      }
      if (style.opacity !== "1") to[at].setAttribute("opacity", style.opacity);
    });
    copy.querySelectorAll(LEFT_OUT).forEach((each) => each.remove());
    copy.removeAttribute("style");
    for (const name of ["x", "y", "width", "height"]) copy.setAttribute(name, round(box[name]));
    this.reach(box);
    return [copy];
  }

  // A canvas that can tell its shapes is drawn in these, another one as it is.
  canvas(one, box) {
    this.reach(box);
    const told = one.ampscopeShapes?.();
    if (told) return [node("svg", { ...box }, ...told)];
    return [node("image", { ...box, href: one.toDataURL() })];
  }
}

// The whole: `title` and `under` stand on top, `label` is for those who do not see it.
function pictureOf(part, { title, under, label }) {
  const picture = new Picture();
  const shapes = picture.element(part);
  const page = getComputedStyle(document.querySelector(".stApp"));
  const [left, top, right, foot] = picture.edges.map((edge) => (Number.isFinite(edge) ? edge : 0));
  const [x, y] = [left - MARGIN, top - MARGIN - 48];
  const [width, height] = [Math.ceil(Math.max(right - left, 320) + 2 * MARGIN), Math.ceil(foot - top + 2 * MARGIN + 48)];
  const words = (text, down, size, weight) =>
    node("text", { x: left, y: y + down, "font-family": page.fontFamily, "font-size": `${size}px`, "font-weight": weight, ...painted("fill", page.color) }, text);
  return node(
    "svg",
    { xmlns: SVG, viewBox: [x, y, width, height].map(round).join(" "), width, height, role: "img" },
    node("title", {}, title), node("desc", {}, label), picture.defs,
    node("rect", { x, y, width, height, ...painted("fill", page.backgroundColor) }),
    words(title, MARGIN + 14, 17, 600), words(under, MARGIN + 34, 12), ...shapes,
  );
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Saves it, in SVG or as twice as many pixels as on screen.
async function savePicture(part, format, told) {
  const svg = pictureOf(part, told);
  const vector = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
  if (format === "svg") return download(vector, `${told.name}.svg`);
  const image = new Image();
  image.src = URL.createObjectURL(vector);
  await image.decode();
  URL.revokeObjectURL(image.src);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => blob && download(blob, `${told.name}.png`));
}

// CSS as SVG: colours, gradients, borders and shadows of a box. Widths are in pixels of the page.
const SVG = "http://www.w3.org/2000/svg";
const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
const colors = new Map();

// A colour in whatever way CSS writes it, as [rgb, opacity]: other programs know no color-mix.
function colorOf(css) {
  if (!colors.has(css)) {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = "#000";
    pixel.fillStyle = css;
    const opaque = /^(#[0-9a-f]{6}|rgb\()/.test(pixel.fillStyle) ? pixel.fillStyle : "";
    pixel.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = pixel.getImageData(0, 0, 1, 1).data;
    colors.set(css, opaque ? [opaque, 1] : [`rgb(${red},${green},${blue})`, alpha / 255]);
  }
  return colors.get(css);
}

const round = (value) => (typeof value === "number" ? Math.round(value * 100) / 100 : value);

function node(tag, attributes = {}, ...children) {
  const one = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) one.setAttribute(name, round(value));
  one.append(...children);
  return one;
}

function painted(attribute, css) {
  const [color, alpha] = colorOf(css);
  return { [attribute]: color, [`${attribute.replace("-color", "")}-opacity`]: alpha < 1 ? alpha : undefined };
}

// Pieces between commas that no bracket holds together.
const pieces = (css) => css.split(/,\s*(?![^()]*(?:\([^()]*\)[^()]*)*\))/);

// A linear gradient that lies over a box; `stop` gives the attributes of a colour.
function gradient(defs, css, box, stop = (color) => painted("stop-color", color)) {
  const found = /^(repeating-)?linear-gradient\((.*)\)$/s.exec(css);
  if (!found) return "none";
  const parts = pieces(found[2]);
  const sides = { "to right": 90, "to left": 270, "to top": 0, "to bottom": 180 };
  const told = parts[0] in sides ? sides[parts[0]] : parts[0].endsWith("deg") ? parseFloat(parts[0]) : null;
  if (told !== null) parts.shift();
  const angle = ((told ?? 180) * Math.PI) / 180;
  const [across, down] = [Math.sin(angle), -Math.cos(angle)];
  const length = Math.abs(box.width * across) + Math.abs(box.height * down);
  const stops = parts.flatMap((part) => {
    const [, color, places] = /^(.*?)((?:\s+-?[\d.e-]+(?:px|%))*)$/s.exec(part);
    const at = places.trim() ? places.trim().split(/\s+/) : [null];
    return at.map((place) => [color, place && (place.endsWith("%") ? (parseFloat(place) / 100) * length : parseFloat(place))]);
  });
  stops.forEach((one, at) => (one[1] ??= (at / Math.max(stops.length - 1, 1)) * length));
  const end = Math.max(stops.at(-1)[1], 0.01);
  const [x, y] = [box.x + (box.width - length * across) / 2, box.y + (box.height - length * down) / 2];
  const id = `paint-${defs.childElementCount}`;
  const line = { id, gradientUnits: "userSpaceOnUse", x1: x, y1: y, x2: x + end * across, y2: y + end * down };
  const drawn = stops.map(([color, place]) => node("stop", { offset: round(place / end), ...stop(color) }));
  defs.append(node("linearGradient", { ...line, spreadMethod: found[1] ? "repeat" : undefined }, ...drawn));
  return `url(#${id})`;
}

const rectangle = ({ x, y, width, height }) => `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}z`;
const grown = (box, by) => ({ x: box.x - by, y: box.y - by, width: box.width + 2 * by, height: box.height + 2 * by });

// What a shadow without blur covers: a frame inside of the box, or around it.
function shadow(css, box) {
  const color = /^(color\(.*?\)|[a-z]+\(.*?\)|#\w+|\w+)/s.exec(css)?.[0];
  const [right, down, blur, spread] = css.slice(color?.length).match(/-?[\d.]+(?=px)/g)?.map(Number) ?? [];
  if (!color || blur) return [];
  const inset = css.endsWith("inset");
  const moved = grown(box, inset ? -spread : spread);
  let [left, top, end, foot] = [moved.x + right, moved.y + down, moved.x + right + moved.width, moved.y + down + moved.height];
  if (inset) [left, top, end, foot] = [Math.max(left, box.x), Math.max(top, box.y), Math.min(end, box.x + box.width), Math.min(foot, box.y + box.height)];
  const other = { x: left, y: top, width: Math.max(end - left, 0), height: Math.max(foot - top, 0) };
  return [node("path", { d: rectangle(box) + rectangle(other), "fill-rule": "evenodd", ...painted("fill", color) })];
}

function borders(style, box) {
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({
    width: style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`]) || 0,
    color: style[`border${side}Color`],
    dash: style[`border${side}Style`] === "dashed",
  }));
  const pen = (side) => ({ fill: "none", ...painted("stroke", side.color), "stroke-width": side.width, "stroke-dasharray": side.dash ? `${3 * side.width} ${2 * side.width}` : undefined });
  const [first] = sides;
  if (first.width && sides.every((side) => JSON.stringify(side) === JSON.stringify(first))) {
    return [node("rect", { ...grown(box, -first.width / 2), rx: parseFloat(style.borderTopLeftRadius) || undefined, ...pen(first) })];
  }
  const [left, top, right, foot] = [box.x, box.y, box.x + box.width, box.y + box.height];
  const [up, side, down, near] = sides.map((each) => each.width / 2);
  const ways = [`M${left} ${top + up}H${right}`, `M${right - side} ${top}V${foot}`, `M${left} ${foot - down}H${right}`, `M${left + near} ${top}V${foot}`];
  return sides.flatMap((each, at) => (each.width ? [node("path", { d: ways[at], ...pen(each) })] : []));
}

// A box as it is painted: its colour, its gradients, its shadows, its borders.
function boxShapes(defs, style, box) {
  const mask = style.maskImage && style.maskImage !== "none" ? gradient(defs, style.maskImage, box, (color) => ({ "stop-color": "#fff", "stop-opacity": colorOf(color)[1] })) : "none";
  const shape = { ...box, rx: parseFloat(style.borderTopLeftRadius) || undefined };
  const shapes = [];
  if (colorOf(style.backgroundColor)[1] > 0) shapes.push(node("rect", { ...shape, ...painted("fill", style.backgroundColor) }));
  if (style.backgroundImage !== "none") {
    for (const one of pieces(style.backgroundImage).reverse()) shapes.push(node("rect", { ...shape, fill: gradient(defs, one, box) }));
  }
  if (style.boxShadow !== "none") shapes.push(...pieces(style.boxShadow).reverse().flatMap((one) => shadow(one, box)));
  shapes.push(...borders(style, box));
  if (mask === "none" || !shapes.length) return shapes;
  const id = `mask-${defs.childElementCount}`;
  defs.append(node("mask", { id }, node("rect", { ...box, fill: mask })));
  return [node("g", { mask: `url(#${id})` }, ...shapes)];
}

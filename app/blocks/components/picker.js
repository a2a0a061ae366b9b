// A list whose lines can be picked. Everything that is shown is set as text or as a number, never as markup.
const DEEPEST = 10; // levels that are indented: a deeper tree would leave no room for its names

function bar(row) {
  const box = element("span", "bar");
  for (const part of row.bar) {
    const mark = element("i", part.kind);
    mark.style.left = `${Number(part.left)}%`;
    mark.style.width = `${Number(part.width)}%`;
    if (part.color) mark.style.background = part.color;
    box.append(mark);
  }
  return box;
}

function line(row, pick) {
  const one = element(row.href ? "a" : "button", `line ${row.kind || ""}`);
  if (row.href) one.href = row.href;
  else one.type = "button";
  one.title = row.hint || "";
  one.onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a link opens elsewhere
    event.preventDefault();
    pick(row.id);
  };
  if (one.classList.contains("current")) one.setAttribute("aria-current", "true");
  one.append(element("span", "lead", row.lead));
  const words = element("span", "words");
  words.style.paddingLeft = `${Math.min(Number(row.depth || 0), DEEPEST) * 14}px`;
  words.append(element("b", "text", row.text));
  if (row.note) words.append(element("span", "note", row.note));
  one.append(words);
  if (row.bar) one.append(bar(row));
  one.append(element("span", "tail", row.tail));
  return one;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const list = parentElement.querySelector(".list");
  const pick = (id) => setTriggerValue("picked", id);
  list.style.maxHeight = `${Number(data.height)}px`;
  list.setAttribute("aria-label", data.label);
  const held = list.contains(parentElement.activeElement); // the keyboard stays where it was
  list.replaceChildren(...data.rows.map((row) => line(row, pick)));
  const current = list.querySelector(".current");
  if (current && held) current.focus({ preventScroll: true });
  if (current) list.scrollTop = current.offsetTop - (list.clientHeight - current.clientHeight) / 2;
}

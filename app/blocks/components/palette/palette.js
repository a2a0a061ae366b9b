// A search that opens with Ctrl-K. Everything that is shown is set as text, never as markup.
const PAUSE = 150; // milliseconds without a key after which is searched

// The text with every searched word in it marked.
function marked(text, searched) {
  const all = document.createDocumentFragment();
  const low = text.toLowerCase();
  const hit = new Array(text.length).fill(false);
  for (const word of searched.toLowerCase().split(/\s+/).filter(Boolean)) {
    for (let at = low.indexOf(word); at >= 0; at = low.indexOf(word, at + 1)) hit.fill(true, at, at + word.length);
  }
  for (let at = 0; at < text.length; ) {
    let end = at;
    while (end < text.length && hit[end] === hit[at]) end += 1;
    const part = text.slice(at, end);
    all.append(hit[at] ? element("mark", "", part) : part);
    at = end;
  }
  return all;
}

const COMMANDS = {
  link: () => navigator.clipboard.writeText(location.href).then(() => "The link to this page is copied.", () => "The browser does not allow to copy."),
  // Streamlit has no call for it: where it keeps the theme of a page, for each of which it keeps one.
  theme: (name, paths) => {
    for (const path of paths) localStorage.setItem(`stActiveTheme-/${path}-v2`, JSON.stringify(name));
    location.reload();
  },
};

function save(file) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([file.text], { type: "text/html" }));
  link.download = file.name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function build(root, view) {
  const open = element("button", "open");
  open.type = "button";
  open.append(element("span", "", "Search"), element("kbd", "", navigator.platform.startsWith("Mac") ? "\u2318 K" : "Ctrl K"));
  open.setAttribute("aria-keyshortcuts", "Control+K Meta+K");
  open.setAttribute("aria-haspopup", "dialog");
  const dialog = element("dialog");
  dialog.setAttribute("aria-label", "Search this run");
  const input = element("input");
  input.type = "text";
  input.placeholder = "Modules, ops, lines, steps, pages, commands";
  for (const [name, value] of Object.entries({ role: "combobox", "aria-expanded": "true", "aria-controls": "found", "aria-autocomplete": "list" })) {
    input.setAttribute(name, value);
  }
  input.setAttribute("aria-label", input.placeholder);
  const list = element("div", "found");
  list.id = "found";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Found");
  const said = element("div", "nothing-found");
  said.setAttribute("role", "status");
  dialog.append(input, list, said);
  root.replaceChildren(open, dialog);
  Object.assign(view, { dialog, input, list, said });
}

export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
  const root = parentElement.querySelector(".palette");
  const view = (root.view ??= { at: 0, saved: 0, enter: false });
  if (!view.dialog) build(root, view);
  const { dialog, input, list, said } = view;
  const offers = () => [...list.querySelectorAll(".offer")];

  const show = () => {
    if (dialog.open) return;
    said.textContent = "";
    dialog.showModal();
    input.select();
  };
  const move = (to) => {
    const all = offers();
    view.at = all.length ? (to + all.length) % all.length : 0;
    all.forEach((one, number) => {
      one.classList.toggle("at", number === view.at);
      one.setAttribute("aria-selected", String(number === view.at));
    });
    input.setAttribute("aria-activedescendant", all.length ? `offer-${view.at}` : "");
    all[view.at]?.scrollIntoView({ block: "nearest" });
  };
  const choose = async (offer) => {
    const [name, ...rest] = offer.go.split(" ");
    if (offer.is_command && name in COMMANDS) {
      const words = await COMMANDS[name](rest.join(" "), data.paths);
      if (words) said.textContent = words;
      return;
    }
    dialog.close();
    setTriggerValue("go", offer.go);
  };
  const ask = () => {
    clearTimeout(view.timer);
    view.timer = setTimeout(() => setStateValue("asked", input.value.trim()), PAUSE);
  };
  const line = (offer, number) => {
    const one = element(offer.is_command ? "div" : "a", "offer");
    if (!offer.is_command) one.href = offer.go;
    one.id = `offer-${number}`;
    one.tabIndex = -1;
    one.setAttribute("role", "option");
    const text = element("span", "text");
    text.append(marked(offer.text, data.text));
    const note = element("span", "note");
    note.append(marked(offer.note, data.text));
    one.append(text, note);
    one.onpointermove = () => view.at !== number && move(number);
    one.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab or window
      event.preventDefault();
      choose(offer);
    };
    return one;
  };
  const draw = () => {
    let number = 0;
    const groups = data.groups.map((group) => {
      const box = element("div", "group");
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", group.title);
      const title = element("div", "title");
      title.setAttribute("aria-hidden", "true");
      const few = group.offers.length < group.total ? `${group.offers.length} of ${group.total.toLocaleString("en")}` : String(group.total);
      title.append(element("span", "", group.title), element("span", "", data.text ? few : ""));
      box.append(title, ...group.offers.map((offer) => line(offer, number++)));
      return box;
    });
    list.replaceChildren(...groups);
    list.hidden = !groups.length;
    said.textContent = groups.length ? "" : "Nothing in this run has all of these words.";
    move(0);
  };

  dialog.onclick = (event) => event.target === dialog && dialog.close();
  root.querySelector(".open").onclick = show;
  input.oninput = ask;
  dialog.onkeydown = (event) => {
    event.stopPropagation(); // the page's own keys are letters
    if (event.key === "ArrowDown") move(view.at + 1);
    else if (event.key === "ArrowUp") move(view.at - 1);
    else if (event.key === "Enter") {
      if (input.value.trim() === data.text) offers()[view.at]?.click();
      else view.enter = true; // what was typed is being searched
    } else return;
    event.preventDefault();
  };
  const told = JSON.stringify([data.text, data.groups]);
  if (told !== view.told) {
    view.told = told;
    draw();
  }
  if (data.file && data.file.number > view.saved) {
    view.saved = data.file.number;
    save(data.file);
  }
  if (view.enter && input.value.trim() === data.text) {
    view.enter = false;
    offers()[0]?.click();
  }
  const keys = (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    show();
  };
  document.addEventListener("keydown", keys, true);
  return () => document.removeEventListener("keydown", keys, true);
}

// What each key does, and the button that does the same. Streamlit keeps C and R to itself.
const ICONS = {
  first: "M6 5v14M19 5l-9 7 9 7z",
  back: "M16 5l-9 7 9 7z",
  play: "M7 4l13 8-13 8z",
  pause: "M8 5v14M16 5v14",
  on: "M8 5l9 7-9 7z",
  last: "M18 5v14M5 5l9 7-9 7z",
  closer: "M12 6v12M6 12h12",
  farther: "M6 12h12",
  whole: "M4 12h16M8 8l-4 4 4 4M16 8l4 4-4 4",
};
const SPEEDS = [0.25, 1, 4];
const JUMPS = [
  ["n", "born", "NaN or inf", "Where NaN or infinity begins that is not intended: nothing that the op read was so; P is the one before"],
  ["l", "near", "near its limit", "Largest value above 1/8 of what the dtype holds"],
  ["t", "cast", "conversion", "An op that only converts to another dtype"],
  ["m", "module", "module", "Where another module begins"],
  ["f", "found", "found", "An op that the search finds"],
  ["x", "parts", "difference", "Where the two steps part: another size, or finite in one alone"],
];
const CLOSER = 1.5; // by what a key zooms
const ASIDE = 0.25; // of the width, by what a key pans

function keysOf(track) {
  const zoom = (factor) => {
    track.view.zoom(factor, track.view.x(track.at + 0.5) >= 0 && track.at < track.view.to ? track.view.x(track.at + 0.5) : undefined);
    track.draw();
  };
  const pan = (part) => {
    track.view.pan(part * (track.view.to - track.view.from));
    track.draw();
  };
  const keys = {
    Home: () => track.choose(0),
    ArrowLeft: () => track.choose(track.at - 1),
    ArrowRight: () => track.choose(track.at + 1),
    End: () => track.choose(track.step.count - 1),
    " ": () => track.play(),
    w: () => zoom(CLOSER),
    s: () => zoom(1 / CLOSER),
    a: () => pan(-ASIDE),
    d: () => pan(ASIDE),
    0: () => {
      track.view.whole();
      track.draw();
    },
    b: () => track.halves.length && track.choose(track.halves[0]),
    p: () => track.jump("born", -1),
  };
  for (const [key, places] of JUMPS) keys[key] = (event) => track.jump(places, event?.shiftKey ? -1 : 1);
  return keys;
}

// Whether a key is meant for something else: a field, a list that is open, a button that has the keyboard.
function isTaken(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return true;
  const target = event.composedPath()[0];
  if (!(target instanceof Element)) return false;
  if (target.closest("input, textarea, select, [contenteditable=true], [role=combobox], [role=listbox], [role=dialog], [role=slider]")) return true;
  return event.key === " " && Boolean(target.closest("button, a, summary, [role=button]"));
}

function watchKeys(track) {
  const keys = keysOf(track);
  const pressed = (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || !track.step?.count || isTaken(event)) return;
    event.preventDefault();
    act(event);
  };
  document.addEventListener("keydown", pressed);
  return () => document.removeEventListener("keydown", pressed);
}

function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

function button(key, shape, words, hint, act) {
  const one = document.createElement("button");
  one.type = "button";
  one.title = `${hint} (${key})`;
  if (shape) one.append(icon(shape));
  else one.textContent = words;
  if (shape) one.setAttribute("aria-label", words);
  const named = { "←": "ArrowLeft", "→": "ArrowRight" };
  one.setAttribute("aria-keyshortcuts", named[key] ?? key);
  one.onclick = act;
  return one;
}

// The row of buttons; those that lead somewhere are written anew for each step.
function fillBar(track, bar) {
  const keys = keysOf(track);
  const group = (...buttons) => {
    const one = document.createElement("span");
    one.append(...buttons);
    bar.append(one);
    return one;
  };
  const player = button("Space", "play", "Play", "Play or pause", keys[" "]);
  player.className = "player";
  group(
    button("Home", "first", "First op", "To the first op", keys.Home),
    button("←", "back", "One op back", "One op back", keys.ArrowLeft),
    player,
    button("→", "on", "One op on", "One op on", keys.ArrowRight),
    button("End", "last", "Last op", "To the last op", keys.End),
  );
  group(
    ...JUMPS.map(([key, places, words, hint]) => {
      const one = button(key.toUpperCase(), "", words, `Next: ${hint}`, keys[key]);
      one.dataset.places = places;
      return one;
    }),
  );
  const zooms = group(
    button("S", "farther", "Farther away", "Farther away", keys.s),
    button("W", "closer", "Closer", "Closer", keys.w),
    button("0", "whole", "Whole step", "The whole step; A and D move along it", keys[0]),
  );
  zooms.className = "zooms"; // where there is no room for them, the strip and the keys do the same
  const speed = document.createElement("select");
  speed.setAttribute("aria-label", "Speed of playing");
  speed.append(...["slow", "normal", "fast"].map((words, at) => new Option(words, SPEEDS[at], at === 1, at === 1)));
  speed.onchange = () => {
    track.speed = Number(speed.value);
    speed.blur();
  };
  group(speed);
}

function writeBar(track, bar) {
  for (const one of bar.querySelectorAll("[data-places]")) {
    const [key, places, words] = JUMPS.find((each) => each[1] === one.dataset.places);
    const found = track.step.places[places];
    one.hidden = found === null || (places === "parts" && !track.step.other);
    one.disabled = !found?.length;
    const letter = document.createElement("kbd");
    letter.textContent = key.toUpperCase();
    one.replaceChildren(`${words} (${number(found?.length ?? 0)})`, letter);
  }
}

function writePlayer(track, bar) {
  const one = bar.querySelector(".player");
  one.replaceChildren(icon(track.playing ? "pause" : "play"));
  one.setAttribute("aria-label", track.playing ? "Pause" : "Play");
}

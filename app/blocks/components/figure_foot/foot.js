// In a figure, what has something to copy does so, and says it for a moment.
const COPIED_MS = 1200;

function copyOnClick(event) {
  const one = event.target instanceof Element && event.target.closest("[data-copy]");
  if (!one || one.dataset.words) return;
  one.dataset.words = one.textContent;
  const say = (words) => {
    one.textContent = words;
    setTimeout(() => {
      one.textContent = one.dataset.words;
      delete one.dataset.words;
    }, COPIED_MS);
  };
  navigator.clipboard.writeText(one.dataset.copy).then(() => say("Copied"), () => say("The browser does not allow to copy"));
}

if (!window.ampscopeCopies) document.addEventListener("click", copyOnClick);
window.ampscopeCopies = true;

// The foot itself: the range in sight, and the buttons that save the figure.
export default function ({ data, parentElement, setTriggerValue }) {
  const foot = parentElement.querySelector(".foot");
  const button = (words, title, act) => {
    const one = element("button", "", words);
    one.type = "button";
    one.title = title;
    one.onclick = act;
    return one;
  };
  const said = element("span", "said");
  said.setAttribute("role", "status");
  const parts = [said];
  if (data.range) {
    parts.push(element("span", "range", data.range), button("Whole run", "Show all steps", () => tell(RANGE, "")));
  }
  parts.push(element("span", "room", ""));
  for (const format of ["svg", "png"]) {
    const save = () => {
      const part = document.querySelector(`.st-key-figure-${CSS.escape(data.figure)}`);
      const failed = () => (said.textContent = "The browser could not draw it");
      if (part) savePicture(part, format, data).then(() => (said.textContent = ""), failed);
    };
    const one = button(format.toUpperCase(), `Save this figure as ${format.toUpperCase()}`, save);
    one.setAttribute("aria-label", `${format.toUpperCase()}: ${data.title}`);
    parts.push(one);
  }
  foot.replaceChildren(...parts);
  return data.steps ? watchSteps(foot, data, setTriggerValue) : undefined;
}
